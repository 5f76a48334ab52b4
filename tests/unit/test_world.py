"""World and how it is read from an environment: pure, no process is started here."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.world import World, read_world
from closeranks.world.environment import Launch, is_loopback, read_launch
from closeranks.world.hostlist import expand_hostlist, expand_task_counts

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# As srun of Slurm 22.05 sets them: the last of three tasks, on two nodes.
SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
# The batch script itself: granted four tasks, but it is only itself.
SLURM_BATCH = {
    "SLURM_JOB_ID": "41",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_TASKS_PER_NODE": "3,1",
}
# As mpirun of Open MPI 4.1 sets them: rank 3 of 4, on the second of two hosts.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "117.0;tcp://192.0.2.2,172.17.0.1:53321;tcp6://[fd00::2]:60099",
    "OMPI_MCA_orte_local_daemon_uri": "117.2;tcp://192.0.2.3:46573;tcp6://[fd00::3]:53293",
    "PMIX_NAMESPACE": "1176502273",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- World -------------------------------------------------------------------------------------


def test_a_world_is_frozen_and_compares_by_value() -> None:
    world = World(rank=1, size=2, local_rank=1, local_size=2, host="a", epoch=0)
    assert world == dataclasses.replace(world)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 0  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"local_rank": 2}, {"epoch": -1}])
def test_a_world_that_cannot_be_is_not_made(wrong: dict[str, int]) -> None:
    values = {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "epoch": 0} | wrong
    with pytest.raises(AssertionError):
        World(host="a", **values)


# --- torchrun, and no launcher -----------------------------------------------------------------


def test_torchruns_variables() -> None:
    assert read_world(TORCHRUN, "h") == World(5, 8, 1, 4, "h", epoch=2)
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, "node1", 29500, 2, agent_store=True)


def test_nothing_is_a_world_of_one_on_a_port_to_be_found() -> None:
    assert read_world({}) == World(0, 1, 0, 1, "localhost", 0)
    assert read_launch({}) == Launch(0, 1, 0, 1, "127.0.0.1", None, 0, agent_store=False)
    assert read_launch({"RANK": "", "WORLD_SIZE": " "}) == read_launch({})
    assert read_launch({"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}).port == 1234
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) == read_launch({})


def test_local_ranks_that_nobody_told_are_left_to_be_found_out() -> None:
    far = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert (read_launch(far).local_rank, read_launch(far).local_size) == (None, None)
    assert read_world(far) == World(5, 8, 0, 1, "localhost", 2)
    near = far | {"MASTER_ADDR": "127.0.0.1"}
    assert read_world(near) == World(5, 8, 5, 8, "localhost", 2)
    assert read_world(without(TORCHRUN, "LOCAL_WORLD_SIZE")).local_rank == 1
    assert read_world(without(TORCHRUN, "LOCAL_RANK")).local_size == 4


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node1", False),
        ("fd00::2", False),
    ],
)
def test_loopback_is_known_without_looking_up_names(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


# --- Slurm -------------------------------------------------------------------------------------


def test_an_srun_task_meets_at_its_steps_first_node() -> None:
    launch = read_launch(SLURM)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (2, 3, 0, 1)
    assert launch.address == "node02"
    assert launch.port == 10_000 + 41 * 16 + 3
    first = read_launch(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert (first.address, first.port, first.local_size) == ("node02", launch.port, 2)


def test_the_jobs_nodes_are_used_where_slurm_names_no_step_nodes() -> None:
    assert read_launch(without(SLURM, "SLURM_STEP_NODELIST")).address == "node01"


def test_one_node_meets_on_loopback() -> None:
    here = SLURM | {"SLURM_STEP_NODELIST": "node02", "SLURM_STEP_TASKS_PER_NODE": "3"}
    here["SLURM_NODEID"] = "0"
    assert read_launch(here).address == "127.0.0.1"
    assert read_launch(here).local_size == 3


def test_steps_and_neighbouring_jobs_have_ports_of_their_own() -> None:
    ports = {
        read_launch(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(123_000, 124_000)
        for step in range(16)
    }
    assert len(ports) == 16_000
    assert all(port is not None and 10_000 <= port < 30_000 for port in ports)


def test_what_the_user_set_beside_slurm_stands() -> None:
    launch = read_launch(SLURM | {"MASTER_ADDR": "login", "MASTER_PORT": "7", "WORLD_SIZE": "3"})
    assert (launch.rank, launch.size, launch.address, launch.port) == (2, 3, "login", 7)
    wrapper = SLURM | {"RANK": "2", "WORLD_SIZE": "3"}  # exported by the job's own wrapper
    assert read_launch(wrapper) == read_launch(SLURM)


def test_torchrun_under_srun_is_torchruns() -> None:
    assert read_launch(SLURM | TORCHRUN) == read_launch(TORCHRUN)
    assert read_launch(SLURM_BATCH | TORCHRUN) == read_launch(TORCHRUN)
    assert read_launch(SLURM | {"SLURM_NTASKS": "9"} | TORCHRUN) == read_launch(TORCHRUN)


def test_a_batch_script_with_one_task_is_a_world_of_one() -> None:
    assert read_launch(SLURM_BATCH | {"SLURM_NTASKS": "1"}) == read_launch({})
    assert read_launch(without(SLURM_BATCH, "SLURM_NTASKS")) == read_launch({})


# --- Open MPI ----------------------------------------------------------------------------------


def test_an_mpirun_rank_meets_where_mpirun_listens() -> None:
    launch = read_launch(OPEN_MPI)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 4, 0, 1)
    assert launch.address == "192.0.2.2"
    assert launch.port is not None and 10_000 <= launch.port < 30_000
    other_job = read_launch(OPEN_MPI | {"PMIX_NAMESPACE": "1176502274"})
    assert other_job.port != launch.port


def test_mpirun_on_one_host_meets_on_loopback() -> None:
    here = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert read_launch(without(here, "OMPI_MCA_orte_hnp_uri")).address == "127.0.0.1"


def test_mpirun_inside_a_slurm_job_is_mpiruns() -> None:
    assert read_launch(OPEN_MPI | SLURM) == read_launch(OPEN_MPI)


def test_rank_0_notices_that_mpirun_was_typed_elsewhere() -> None:
    rank_0 = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}
    with pytest.raises(ValueError, match=r"192\.0\.2\.2.*another host.*set MASTER_ADDR"):
        read_launch(rank_0)
    daemon = {"OMPI_MCA_orte_local_daemon_uri": "117.1;tcp://192.0.2.2:35955"}
    assert read_launch(rank_0 | daemon).address == "192.0.2.2"
    assert read_launch(rank_0 | {"MASTER_ADDR": "10.0.0.7"}).address == "10.0.0.7"


@pytest.mark.parametrize("uri", ["", "117.0;tcp://127.0.0.1:53321"])
def test_several_hosts_without_a_usable_uri_ask_for_an_address(uri: str) -> None:
    with pytest.raises(ValueError, match=r"OMPI_MCA_orte_hnp_uri.*set MASTER_ADDR"):
        read_launch(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri})


# --- half-set and contradictory variables ------------------------------------------------------

WRONG = {
    "rank without size": ({"RANK": "3"}, ["RANK=3", "WORLD_SIZE unset"]),
    "size without rank": ({"WORLD_SIZE": "2"}, ["RANK unset", "WORLD_SIZE=2"]),
    "no such rank": (TORCHRUN | {"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
    "no ranks": (TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    "not a number": (TORCHRUN | {"RANK": "first"}, ["RANK='first'"]),
    "negative": (TORCHRUN | {"RANK": "-1"}, ["RANK='-1'"]),
    "a digit of another script": (TORCHRUN | {"RANK": "²"}, ["RANK='²'"]),
    "no such local rank": (
        TORCHRUN | {"LOCAL_RANK": "4"},
        ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"],
    ),
    "more here than anywhere": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "9"},
        ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"],
    ),
    "nobody here": (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
    "local rank alone": ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "LOCAL_WORLD_SIZE unset"]),
    "far address alone": ({"MASTER_ADDR": "node7"}, ["MASTER_ADDR=node7", "RANK"]),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR unset", "8 ranks"]),
    "no port": (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT unset"]),
    "no such port": (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
    "srun forgotten": (SLURM_BATCH, ["SLURM_NTASKS=4", "SLURM_STEP_ID unset", "srun"]),
    "srun forgotten in salloc": (
        without(SLURM_BATCH, "SLURM_PROCID"),
        ["SLURM_NTASKS=4", "SLURM_PROCID unset"],
    ),
    "slurm against torchrun": (
        SLURM | {"WORLD_SIZE": "2"},
        ["WORLD_SIZE=2", "SLURM_NTASKS=3", "srun"],
    ),
    "slurm against a rank": (SLURM | {"RANK": "0"}, ["RANK=0", "SLURM_PROCID=2"]),
    "slurm without a rank": (without(SLURM, "SLURM_PROCID"), ["SLURM_PROCID unset"]),
    "slurm without a size": (
        without(SLURM, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        ["SLURM_PROCID=2", "SLURM_NTASKS unset"],
    ),
    "slurm against itself": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "4"},
        ["SLURM_STEP_NUM_TASKS=4", "SLURM_NTASKS=3"],
    ),
    "no such task": (SLURM | {"SLURM_PROCID": "3"}, ["SLURM_PROCID=3", "SLURM_NTASKS=3"]),
    "no nodes": (
        without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        ["SLURM_STEP_NODELIST", "MASTER_ADDR unset"],
    ),
    "nodes that are none": (
        SLURM | {"SLURM_STEP_NODELIST": "node[1"},
        ["SLURM_STEP_NODELIST", "node[1"],
    ),
    "slurm without a job": (without(SLURM, "SLURM_JOB_ID"), ["MASTER_PORT unset"]),
    "mpirun without a size": (
        without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE unset"],
    ),
    "no such mpi rank": (
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"},
        ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"],
    ),
    "mpirun against a size": (
        OPEN_MPI | {"WORLD_SIZE": "2"},
        ["WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=4"],
    ),
    "another mpi": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_RANK=0", "PMI_SIZE=2"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_variables_are_named_with_their_values_and_a_remedy(case: str) -> None:
    environ, named = WRONG[case]
    with pytest.raises(ValueError) as caught:
        read_world(environ)
    for text in [*named, "Nothing was started"]:
        assert text in str(caught.value)


# --- Slurm's compressed lists ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[01-03,07],gpu2", "node01 node02 node03 node07 gpu2"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]-ib", "n098-ib n099-ib n100-ib n101-ib"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("a-b.c.org, [1-2]x", "a-b.c.org 1x 2x"),
        ("n[5]", "n5"),
        ("n[3,1]", "n3 n1"),
    ],
)
def test_a_hostlist_is_expanded(text: str, hosts: str) -> None:
    assert expand_hostlist(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[1-3",
        "n1-3]",
        "n[[1]]",
        "n[3-1]",
        "a,n[3-1]",
        "n[]",
        "n[1,]",
        "n[1-]",
        "n[0-9999999]",
    ],
)
def test_a_hostlist_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand_hostlist(text)


def test_brackets_do_not_multiply_without_bound() -> None:
    with pytest.raises(ValueError, match="names 10000000000 hosts"):
        expand_hostlist("n[0-99999][0-99999]")


@given(first=st.integers(0, 2000), length=st.integers(1, 50), width=st.integers(1, 6))
def test_a_range_has_all_its_hosts_at_least_as_wide_as_its_first(
    first: int, length: int, width: int
) -> None:
    low = str(first).zfill(width)
    names = expand_hostlist(f"n[{low}-{first + length - 1}]")
    assert [int(name[1:]) for name in names] == list(range(first, first + length))
    assert all(len(name) - 1 == max(len(low), len(str(int(name[1:])))) for name in names)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", (4,)), ("2,1", (2, 1)), ("2(x3),1", (2, 2, 2, 1)), ("1(x2)", (1, 1))],
)
def test_task_counts_are_expanded(text: str, counts: tuple[int, ...]) -> None:
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x2", "2(x)", "2,,1"])
def test_task_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="task counts"):
        expand_task_counts(text)
