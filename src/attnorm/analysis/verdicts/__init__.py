"""Judging, apart from measuring: every head gets a verdict with evidence and confidence, the model gets sentences."""

from attnorm.analysis.verdicts.judge import judge_all
from attnorm.analysis.verdicts.model import ModelVerdict, model_verdict
from attnorm.analysis.verdicts.rows import representative_rows
from attnorm.analysis.verdicts.thresholds import MEANING, VERDICTS, Thresholds
from attnorm.analysis.verdicts.what_if import Advice, WhatIf

__all__ = [
    "MEANING",
    "VERDICTS",
    "Advice",
    "ModelVerdict",
    "Thresholds",
    "WhatIf",
    "judge_all",
    "model_verdict",
    "representative_rows",
]
