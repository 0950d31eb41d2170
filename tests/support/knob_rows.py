"""All rows about settings, by what they say."""

from tests.support.knob_rows_inputs import INPUT_ROWS
from tests.support.knob_rows_operation import OPERATION_ROWS
from tests.support.knob_rows_training import TRAINING_ROWS
from tests.support.knobs import Elsewhere, Flip, Refused

_ROWS: list[Flip | Refused | Elsewhere] = [*TRAINING_ROWS, *INPUT_ROWS, *OPERATION_ROWS]
FLIPS = [row for row in _ROWS if isinstance(row, Flip)]
REFUSED = [row for row in _ROWS if isinstance(row, Refused)]
ELSEWHERE = [row for row in _ROWS if isinstance(row, Elsewhere)]
