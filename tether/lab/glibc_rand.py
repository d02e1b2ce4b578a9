"""The random numbers of C programs on Linux, so that a program that calls srand and rand can be repeated draw by draw.

glibc's default generator adds: word i = word i-3 + word i-31, modulo 2^32, and the output is that word without its lowest bit. The first 31
words come from a multiplicative generator, 16807 w modulo 2^31 - 1 (Park and Miller 1988), and 310 outputs are thrown away. Nothing else
in Tether draws from it: it exists to repeat what was printed.
"""

from __future__ import annotations

from collections import deque

import numpy as np

LARGEST = 2**31 - 1  # RAND_MAX


class GlibcRand:
    """`srand(seed)`, then `rand()` as often as it is called.

    >>> rand = GlibcRand(42)
    >>> rand(), rand(), rand()
    (71876166, 708592740, 1483128881)
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"srand takes an unsigned 32-bit number, got {seed}")
        words = [_signed(seed or 1)]  # 0 would stay 0 for ever
        while len(words) < 31:
            # 16807 w mod (2^31 - 1) without leaving 31 bits (Schrage 1979). C divides towards zero: a negative seed differs.
            previous = words[-1]
            quotient = int(previous / 127773)
            word = 16807 * (previous - 127773 * quotient) - 2836 * quotient
            words.append(word + LARGEST if word < 0 else word)
        self._words = deque([w % 2**32 for w in words + words[:3]], maxlen=31)  # the last 31 are all that is needed
        for _ in range(310):
            self()

    def __call__(self) -> int:
        """The next number, 0 to 2^31 - 1."""
        word = (self._words[-3] + self._words[-31]) % 2**32
        self._words.append(word)
        return word >> 1

    def uniform(self) -> np.float32:
        """`(float)rand() / RAND_MAX`, 0 to 1. Both sides are rounded to float32, the divisor to 2^31, so exactly 1 can occur.

        >>> float(GlibcRand(42).uniform())
        0.033469948917627335
        """
        return np.float32(self()) / np.float32(LARGEST)


def _signed(word: int) -> int:
    """The same 32 bits as a signed number."""
    return word - 2**32 if word >= 2**31 else word
