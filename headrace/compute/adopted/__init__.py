"""Models that transformers defines, on the kernels and pages of this project; imported only for such a model.

- `loading`: finds the class, reads the weights, also quantized ones, and refuses what would be computed wrongly.
- `attention`: the calls of attention, masks and mixers, and what a mask allows.
- `decoder`: such a model as a decoder, and one step of it over paged memory.
- `states`: recurrent states of their mixers, by sequence.
- `agreement`: the check at start that it computes the same as transformers alone.
- `modules`: the kernels inside their modules, recognised by what they compute.
- `layers`: whole decoder layers in one call of the kernels.
- `experts`: the same for experts with three-dimensional weights.
- `samples`: inputs for the comparison of two modules.
"""
