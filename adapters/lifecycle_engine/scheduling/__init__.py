"""The parts of the scheduler: its line, its slots, its books."""
