"""Text to train the byte-level BPE of a made checkpoint on. Generated, so it is the same everywhere.

Owns a vocabulary of invented and common words with Zipf-like frequencies; knows no tokenizer.
"""

import random
from collections.abc import Iterator

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gr h j k l m n p pl pr qu r s sc sh sl sp st str t th tr v w".split()
)
_VOWELS = "a e i o u ai ea ee ie oa oo ou".split()
_CODAS = "b ck d ft g l ll m mp n nd ng nt p r rd rn rt s sh ss st t th".split() + [""] * 8
_ENDINGS = ["", "", "", "ed", "er", "ing", "ion", "ly", "ment", "ness", "s", "y"]
_COMMON = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such our man me
even most made after also did many off before must well back through years much where your way down should because long
each just state those people too mr how little good world make very year still see own work men day get here old life
both between being under three never know same last another while us might great go come since against right came take
used himself few house american use place during high without again home around small however found part school""".split()


def sentences(*, words: int, vocabulary: int) -> Iterator[str]:
    """Sentences of `words` words in all, drawn from `vocabulary` different words, Zipf-distributed."""
    rng = random.Random(20250101)  # not a secret: the text must be the same on every machine
    lexicon = list(dict.fromkeys(_COMMON))
    known = set(lexicon)
    while len(lexicon) < vocabulary:
        word = "".join(_syllable(rng) for _ in range(rng.choice((1, 2, 2, 3)))) + rng.choice(_ENDINGS)
        if word not in known:
            known.add(word)
            lexicon.append(word)
    weights = [1.0 / (rank + 3) for rank in range(len(lexicon))]
    drawn = rng.choices(lexicon, weights, k=words)
    taken = 0
    while taken < words:
        length = rng.randint(4, 18)
        chosen = drawn[taken : taken + length]
        taken += length
        if rng.random() < 0.1:
            chosen.insert(rng.randrange(len(chosen) + 1), str(rng.randint(0, 2100)))
        yield " ".join(chosen).capitalize() + rng.choice((". ", ". ", ". ", "? ", "! ", ".\n"))


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
