"""What breaks a house rule and may, each with its reason. An entry that is not needed is an error.

A key is the path below src/closeranks, for a rule about functions followed by `::` and the dotted
name, as the failing test prints it.
"""

PRINTS: dict[str, str] = {}

BROAD_EXCEPTS: dict[str, str] = {
    "backend/line.py::Line._work_off": "an interruption goes on its way, after others were told",
    "backend/line.py::Line._attempt": "whatever it was is raised where somebody waits for the task",
    "lanes/loaders.py::_answer": "the worker fetches it again, where whatever it was is raised",
    "launch/script.py::_run_target": "whatever ended the user's script is what is reported",
}

_TORCHS_SIGNATURE = "torch's own signature of 20 arguments, which a drop-in has to repeat"

LONG_FUNCTIONS: dict[str, str] = {
    "ddp/wrapper.py::DistributedDataParallel.__init__": _TORCHS_SIGNATURE,
}

LONG_FILES: dict[str, str] = {
    "reducer/reducer.py": "one backward is one story, told from its beginning to its end",
}

MANY_PARAMETERS: dict[str, str] = {
    "lanes/ranks.py::Ranks.steps": "those of torch's DataLoader that users know, and three more",
    "ddp/wrapper.py::DistributedDataParallel.__init__": _TORCHS_SIGNATURE,
}
