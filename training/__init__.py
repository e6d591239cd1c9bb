"""Build of the small target and draft models that ship with Headrace."""
