"""Images in prompts: from pixels to rows that a decoder computes with in place of embeddings.

- `families`: which types of models take images, and what stands in a prompt for one.
- `slots`: the images of running sequences, and the rows of them that a step computes.
- `cache`: the last encoded images, within a limit of bytes.
- `rows_file`: encoded images in memory that several processes share.
- `encoder`: processor, vision tower and projector of a model, as transformers computes them.
- `slices`: runs their code in slices, which another thread asks for.
- `products`: the kernels inside their linear layers.
- `loading`: loads them, and checks that a prompt with an image is computed as by transformers. It and `encoder` are
  imported only for a model that takes images.
"""
