"""The retrieval model's own tokens: no tokenizer, every token stands for itself."""

from __future__ import annotations

SIZE = 2048
PAD, BOS, END = 0, 1, 2
NEEDLE, QUERY = 3, 4  # NEEDLE key value END is a fact, QUERY key asks for it; the answer is its value and END
ASSIGN, TRACK, TO = 5, 6, 7  # ASSIGN source TO name END, TRACK source TO name TO name ...
MOVE, WHERE = 8, 9  # MOVE person place END, WHERE person asks for the newest place
WORDS = range(16, 512)  # of the haystack
KEYS = range(512, 1024)  # of keys, names and persons
VALUES = range(1024, 2048)  # of values and places
