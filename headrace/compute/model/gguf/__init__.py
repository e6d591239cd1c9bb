"""Models in GGUF, the file format of llama.cpp and Ollama: one file, or numbered parts, with everything in it.

- `config`: the fields of a `config.json`.
- `file`: the header, the metadata and the table of tensors, checked before anything in them is used.
- `source`: the weights of a file, each type of tensor as weights that the kernels read.
"""
