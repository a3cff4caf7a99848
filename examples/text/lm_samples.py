"""Writes small files in the formats that `pretrain_gpt.py` and `evaluate_lm.py` read, to try these scripts.

    python examples/text/lm_samples.py

The files have random stories, whose last word follows from the rest. `train.jsonl` is to train on;
`wiki.test.tokens` and `lambada_test.jsonl` have other stories, in the formats of WikiText-103 and LAMBADA.
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

NAMES = ("Ada", "Bruno", "Clara", "David", "Emma", "Felix", "Grete", "Hugo")
THINGS = ("lamp", "kite", "violin", "map", "hammer", "basket", "telescope", "whistle")
PLACES = ("garden", "attic", "harbour", "well-kept barn", "station", "mill", "library", "kitchen")
PARTED = (  # Ordinary text -> how WikiText writes it, with spaces.
    (r"(\w)([-,.])(?=\w)", r"\1 @\2@ "),
    (r"(?<=\S)([.,:;?!)]|'s\b)(?=[\s.,)\"]|$)", r" \1"),
    (r"\((?=\S)", "( "),
    (r'"([^"\n]*)"', r'" \1 "'),
)


def story(draw: random.Random) -> tuple[str, str]:
    """Returns a title and a story of one paragraph, whose last words follow from the rest."""
    one, other = draw.sample(NAMES, 2)
    thing, place, year = draw.choice(THINGS), draw.choice(PLACES), draw.randrange(1850, 1950)
    miles = draw.randrange(2, 10) * 1000
    opening = draw.choice(
        [
            f"In {year} {one}'s {thing} was left in the {place}, {miles:,} miles (or more) from home.",
            f"{one} had a {thing} that was made in {year}, and kept it in the {place}.",
        ]
    )
    middle = draw.choice(
        [
            f'"Where is it?" asked {other}. Nobody knew but {one}.',
            f"{other} had never seen one; {one} had.",
        ]
    )
    return f"The {thing} of {one}", f"{opening} {middle} So {other} went to the {place} and came back with the {thing}"


def parted(text: str) -> str:
    """Returns ordinary text with the spaces of WikiText."""
    for ordinary, spaces in PARTED:
        text = re.sub(ordinary, spaces, text)
    return text


def wikitext(stories: list[tuple[str, str]]) -> str:
    """Returns the articles in the format of WikiText-103, each with a heading."""
    return "".join(f" \n = {title} = \n \n {parted(text)} . \n" for title, text in stories)


def write(folder: Path, count: int, seed: int) -> None:
    """Writes `count` stories to train on, and a tenth of this number into each of the other files."""
    draw = random.Random(seed)
    train, wiki, lambada = ([story(draw) for _ in range(n)] for n in (count, count // 10, count // 10))
    folder.mkdir(parents=True, exist_ok=True)
    plain = [{"text": f"= {title} =\n\n{text}.\n"} for title, text in train]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain))
    (folder / "wiki.test.tokens").write_text(wikitext(wiki))
    (folder / "lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _, text in lambada))


def main() -> None:
    """Writes the files."""
    parser = ArgumentParser(description="Writes sample files.", formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/samples"), help="the folder")
    parser.add_argument("--stories", type=int, default=2000, help="number of stories to train on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stories")
    args = parser.parse_args()
    write(args.out, args.stories, args.seed)
    assert len((args.out / "train.jsonl").read_text().splitlines()) == args.stories
    print("\n".join(str(file) for file in sorted(args.out.iterdir())))


if __name__ == "__main__":
    main()
