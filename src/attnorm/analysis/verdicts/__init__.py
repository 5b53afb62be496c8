"""Judging, apart from measuring: every head gets a verdict with evidence and confidence, the model gets sentences."""

from attnorm.analysis.verdicts.judge import judge_all
from attnorm.analysis.verdicts.model import ModelVerdict, model_verdict
from attnorm.analysis.verdicts.rows import representative_rows
from attnorm.analysis.verdicts.thresholds import Thresholds

__all__ = [
    "ModelVerdict",
    "Thresholds",
    "judge_all",
    "model_verdict",
    "representative_rows",
]
