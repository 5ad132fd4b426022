"""A row of minutes to a score is read off metrics and config.json."""

from bench.minutes import board_row
from utils.metrics.curves import read_metrics
from utils.metrics.logger import Logger


def test_a_row_has_the_first_evaluation_with_the_score(tmp_path):
    with Logger(tmp_path) as logger:
        for step in range(7):
            scores = {"test_env/correct_answer": step / 10} if step % 2 == 0 else {}
            logger.log(step, scores | ({"times/run": 90.0 * step} if step else {}))
    run = read_metrics(tmp_path / "metrics.jsonl")
    origin = {"lmpo": "version 0, commit 0123456789abcdef-dirty", "cpu": "CPU, 2 cores"}
    assert board_row(run, origin, 0.4) == "| 0123456-dirty | CPU, 2 cores | 6.0 | 4 | 9.0 | 60.0% |"
    assert board_row(run, {}, 0.7) == "| ? | ? | never |  | 9.0 | 60.0% |"
