import shutil

import pytest

from rl.environments.base import Episode
from rl.environments.config import MathEnvConfig, PythonToolConfig, SandboxLimits, ToolsEnvConfig
from rl.environments.python_tool import PythonToolError, run_python
from rl.environments.tools import ToolsEnvironment
from tests.support.completions import completion, text_prompt

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
LIMITS = SandboxLimits(wall_s=3.0)


@pytest.mark.parametrize(
    ("code", "text"),
    [("print(37*48)", "1776"), ("x = 1", "(no output)"), ("import math\nprint(math.comb(5, 2))", "10")],
)
def test_what_a_program_prints_is_its_result(code, text):
    assert run_python(code, limits=LIMITS) == text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1/0", "ZeroDivisionError"),
        ("print(", "SyntaxError"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("while True: pass", "was ended: timeout"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "Error"),
    ],
)
def test_a_program_that_fails_is_told_why(code, words):
    with pytest.raises(PythonToolError, match=words):
        run_python(code, limits=SandboxLimits(wall_s=1.0))


async def test_the_model_runs_programs_in_the_tools_environment():
    tool = PythonToolConfig(kind="python", limits=SandboxLimits(wall_s=1.0))
    config = ToolsEnvConfig(kind="tools", tools={"python": tool}, scorer=MathEnvConfig(), timeout_s=20.0)
    environment = ToolsEnvironment("tools", config)
    texts = (
        '<tool_call>{"name": "python", "arguments": {"code": "print(37*48)"}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": "while True: pass"}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": "1", "limits": {"wall_s": 99}}}</tool_call>',
    )
    episodes = [Episode(sample, (), completion(text)) for sample, text in enumerate(texts)]
    contents = [result.messages[0].content for result in await environment.step(text_prompt(), episodes)]
    assert contents[0] == "1776" and "was ended: timeout" in contents[1] and "unknown argument 'limits'" in contents[2]
    await environment.close()
