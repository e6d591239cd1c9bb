"""One generic decoder: its specification, the families as data, rotary tables, weights, where models come from."""
