"""Generated answers compared with references: ROUGE by the rouge-score package, and exact match.

rouge-score's own tokenizer keeps a to z and 0 to 9 alone, which splits Romanian words at every letter with a diacritic;
it is given Unicode words instead (lower case, without punctuation).
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUGE = ("rouge1", "rouge2", "rougeL")
SCORES = (*ROUGE, "exact_match")


class UnicodeWords:
    """Tokenizer with rouge_score's interface: words in lower case, NFC."""

    def tokenize(self, text: str) -> list[str]:
        """Return runs of letters, digits and underscores."""
        return re.findall(r"\w+", unicodedata.normalize("NFC", text).lower())


def answer_scores(written: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Return scores (N, 4) of N answers in the order of `SCORES`, each from 0 to 1.

    F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, ROUGE, 2004), and exact match, which ignores blanks at both ends.
    """
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk and scipy: 0.6 s of every start

    scorer = RougeScorer(list(ROUGE), tokenizer=UnicodeWords())
    found = np.zeros((len(references), len(SCORES)))
    for row, (text, reference) in enumerate(zip(written, references, strict=True)):
        scored = scorer.score(reference, text)
        found[row] = [*(scored[kind].fmeasure for kind in ROUGE), text.strip() == reference.strip()]
    return found
