"""The bundled engine: a vision-language model server in two processes.

The engine process (`worker`) runs a `Scheduler` over a `Runner`; the API process
turns chats into engine requests with a `Processor`. Nothing is imported here, so
that neither process pays for the other one's dependencies.
"""
