"""Replay of a recorded scheduler trace (`trace`): exactly (`exact`), with other settings (`rerun`); tables: `show`."""
