"""One generic decoder for all model families: its specification, weights and files.

- `hub`: finds a model: a folder, the packaged model, or a name on the Hugging Face hub.
- `families`: the model families as data; reads a ``config.json``. `config_reader`: reads single fields of it.
  `gemma4`: what differs by layer in those of Gemma 4. `deepseek`: those with latent keys and values.
- `shape`: what everything but the decoder needs to know of a model, and groups of layers whose blocks have one size.
  `spec`: what the decoder needs to know.
- `hybrids`: reads which layers keep a recurrent state. `mixers`: their sizes and tensors.
  `nemotron_h`, `falcon_h1`: what the configs of these two say.
- `layout`: the tensors of a checkpoint by name and shape, from files or at random. `sharding`: those of one rank.
- `weights`: the decoder's weights from them. `gguf`: the same in files of llama.cpp.
- `rope`: rotary embeddings: how a config describes them, and their tables.
- `kv`: paged keys and values of all layers.
- `decoder`: the decoder.
"""
