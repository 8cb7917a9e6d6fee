"""Text to train the byte-level BPE of a made checkpoint on. Generated, so it is the same everywhere.

Owns a vocabulary of common and invented words with Zipf-like frequencies; knows no tokenizer.
"""

import random
from collections.abc import Iterator

_ONSETS = "b bl br c ch cl cr d dr f fl fr g gr h j k l m n p pl pr qu r s sc sh sl sp st str t th tr v w"
_VOWELS = "a e i o u ai ea ee ie oa oo ou"
_CODAS = "b ck d ft g l ll m mp n nd ng nt p r rd rn rt s sh ss st t th"
_ENDINGS = "ed er ing ion ly ment ness s y"
_COMMON = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my
now over such our man me even most made after also did many off before must well back through years much
where your way down should because long each just state those people too how little good world make very
year still see own work day get here old life both between being under three never know same last another
while us might great go come since against right came take used himself few house use place during high
without again home around small however found part school number water word write find name line
"""
_ENDS = (". ", ". ", ". ", "? ", "! ", ".\n")


def sentences(*, words: int, vocabulary: int) -> Iterator[str]:
    """Sentences of `words` words in all, drawn from `vocabulary` different words."""
    rng = random.Random(20250101)  # fixed: the text must be the same on every machine
    lexicon = _lexicon(rng, vocabulary)
    weights = [1.0 / (rank + 3) for rank in range(len(lexicon))]
    drawn = rng.choices(lexicon, weights, k=words)
    taken = 0
    while taken < words:
        length = rng.randint(4, 18)
        chosen = drawn[taken : taken + length]
        taken += length
        if rng.random() < 0.1:
            chosen.insert(rng.randrange(len(chosen) + 1), str(rng.randint(0, 2100)))
        yield " ".join(chosen).capitalize() + rng.choice(_ENDS)


def _lexicon(rng: random.Random, vocabulary: int) -> list[str]:
    """Common words first, then invented ones of one to three syllables."""
    words = dict.fromkeys(_COMMON.split())
    endings = [*_ENDINGS.split(), "", "", ""]
    while len(words) < vocabulary:
        stem = "".join(_syllable(rng) for _ in range(rng.choice((1, 2, 2, 3))))
        words[stem + rng.choice(endings)] = None
    return list(words)


def _syllable(rng: random.Random) -> str:
    coda = rng.choice(_CODAS.split()) if rng.random() < 0.7 else ""
    return rng.choice(_ONSETS.split()) + rng.choice(_VOWELS.split()) + coda
