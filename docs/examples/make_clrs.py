"""Make the questions of docs/results/clrs-text.md, byte for byte: train.jsonl and test.jsonl.

Takes 7 minutes on one core (dm-clrs 2.0.3, Python 3.11, numpy 2.4.6, x86-64). Where two numbers of a question are
equal, numpy's order of sorting decides the answer: set NPY_DISABLE_CPU_FEATURES="X86_V4 X86_V3", or 3 of the 9,596
answers of the test differ.
"""

import json
from pathlib import Path

from clrs import CLRS_30_ALGS_SETTINGS
from clrs._src.clrs_text.clrs_utils import format_clrs_example
from clrs._src.samplers import build_sampler


def questions(algorithm, size, seed, draws, most, known):
    sampler, _ = build_sampler(
        algorithm, seed=seed, num_samples=-1, length=size, track_max_steps=False, use_padding=False, truncate_decimals=3
    )
    found = {}
    for _ in range(draws):
        question, answer = format_clrs_example(algorithm, sampler.next(batch_size=1))
        if question not in found and question not in known:
            found[question] = answer
        if len(found) == most:
            break
    return found


def write(path, sizes, seed, draws, most, known=frozenset()):
    written = set()
    with Path(path).open("w") as file:
        for algorithm in sorted(CLRS_30_ALGS_SETTINGS):
            for size in sizes:
                for question, answer in questions(algorithm, size, seed + size, draws, most, known).items():
                    record = {"algorithm": algorithm, "size": size, "question": question, "answer": answer}
                    file.write(json.dumps(record) + "\n")
                    written.add(question)
    return written


test = write("test.jsonl", (4, 7, 8, 9, 11, 12, 14, 16, 20, 24), 7_000_000, draws=200, most=32)
write("train.jsonl", (4, 5, 6, 8, 10, 12), 1000, draws=2000, most=2000, known=test)
