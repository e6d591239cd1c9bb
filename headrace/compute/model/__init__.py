"""One generic decoder for all model families: its specification, weights and files.

- `hub`: finds a model: a folder, the packaged model, or a name on the Hugging Face hub.
- `families`: the model families as data; reads a ``config.json``.
- `config_reader`: reads single fields of a config. `rope_config`: reads its rotary embedding.
- `shape`: what everything but the decoder needs to know of a model. `spec`: what the decoder needs to know.
- `layout`: the tensors of a checkpoint by name and shape. `sharding`: the part of them that one rank computes.
- `checkpoint`: the safetensors files. `weights`: the decoder's weights from them. `sources`: from files or at random.
- `rope`: rotary tables.
- `decoder`: the decoder.
- `largest_step`: measures the memory of the largest step.
- `reading`: reads whole texts without an engine.
"""
