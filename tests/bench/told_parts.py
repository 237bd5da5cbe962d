"""Parts of a bench that do what they are told, for the tests; light, since every process that runs one imports it."""

import os
import time

from bench.part_processes import Part


class Told:
    """A part that does what its arguments say."""

    def __init__(self, part, send):
        self.what, self.send, self.name = part.arguments, send, part.name

    def prepare(self):
        if self.what == "raises":
            raise ValueError("no such thing")
        if self.what == "dies":
            os._exit(3)

    def measure(self, left):
        self.send({"kind": "cell", "part": self.name})
        if self.what == "hangs":
            time.sleep(300)
        if self.what == "raises late":
            raise ValueError("too late")


def told(*whats):
    return [Part(f"part{place}", Told, what) for place, what in enumerate(whats)]
