"""Records a scheduler trace: all inputs of an engine and the events of each step, for replay without a model."""
