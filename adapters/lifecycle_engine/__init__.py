"""The bundled engine: a vision-language model server in two processes.

The engine process (`worker`) runs a `Scheduler` over a `Runner`; the API process
turns chats into engine requests with a `Processor`. Nothing is imported here, so
that neither process pays for the other one's dependencies.
"""

# What each process is made of; a room imports from those on its right.
#
#   cli, commands, doctor, launch, load, demo/      the command line
#   app, service -> routes -> dialects -> images    the API process
#        http, chats                                its sockets; chats into prompts
#   worker -> scheduler -> scheduling               the engine process
#        models, sim_runner -> runner               what it runs
#   api_errors, incoming, processor                 what they share
