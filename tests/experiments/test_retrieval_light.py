"""A machine that only trains the plan needs torch and what the trainer needs, no library for figures and tables."""

from tests.fresh import run_fresh

HEAVY = ("matplotlib", "pyarrow", "scipy")


def test_the_plan_needs_no_library_for_figures() -> None:
    code = (
        "import sys; from attnorm.experiments.retrieval.plan import collect, plan; plan(); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_fresh(code).stdout.strip() == "[]"


def test_the_experiment_is_found_under_its_name() -> None:
    from attnorm.experiments.catalogue import experiment

    assert experiment("retrieval").name == "retrieval"
    assert not experiment("retrieval").needs_model
