"""Another library's models on the kernels and pages of this project.

- `modules`: the kernels inside their modules, recognised by what they compute.
- `experts`: the same for experts with three-dimensional weights.
- `samples`: inputs for the comparison of two modules.
"""
