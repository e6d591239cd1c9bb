"""LoRA adapters: read from PEFT's files, and kept on disk, in host memory and on the device by use.

- `layout`: the linear layers that an adapter may change, and where their outputs are in the decoder's.
- `files`: an adapter's files: ranks, scales, and what is refused; its tensors, of layers and of parameters that hold
  all experts of one, checked against the model; the digest.
- `store`: the adapters in host memory and in the places of the device. It also has those of a runner's slots.
"""
