"""Replay of a recorded scheduler trace (`trace`): exactly (`exact`), or with other settings (`rerun`); tables: `show`."""
