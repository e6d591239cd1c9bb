"""Models in GGUF, the file format of llama.cpp and Ollama: one file, or numbered parts, with everything in it.

- `config`: the fields of a `config.json`.
- `file`: the header, the metadata and the table of tensors, checked before anything in them is used.
- `blocks`: the types of tensors as weights that the kernels read. `source`: the weights of a file.
"""
