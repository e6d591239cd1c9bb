"""A recorded engine lives again: the same core, step by step, with a runner that answers from the recording."""
