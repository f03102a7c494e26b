"""What a request goes through between its parsing and its answer."""

from lifecycle_engine._extra import need_server

need_server()
