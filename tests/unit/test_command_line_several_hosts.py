"""Lines of programs that nobody reads: do they name other hosts?"""

from __future__ import annotations

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.unread_hosts import unread_hosts
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.job import Job, UnreadHosts
from nccl_doctor.model.kinds import HOSTS_NOT_EXAMINED
from tests.support.clusters import make_cluster
from tests.support.command_lines import job, said
from tests.support.reports import RUN, made_check, through_json
from tests.support.rows import each_row
from tests.support.verdicts import OK


@each_row(
    ("line", "words"),
    [
        ("python train.py --nnodes 2 --node-rank 0", "the command says --nnodes 2"),
        ("python train.py --num_machines=4", "the command says --num_machines 4"),
        ("python train.py --nnodes 1:3", "the command says --nnodes 1:3"),
        ("python train.py --node_rank 1", "the command says --node_rank 1"),
        ("python train.py --master-addr node0:2900", "the command says --master-addr node0"),
        ("python t.py --dist-url tcp://10.0.0.5:23456", "the command says --dist-url 10.0.0.5"),
        ("python t.py --init-method 'tcp://[fd::5]:9'", "the command says --init-method fd::5"),
        ("python -m nemo trainer.num_nodes=2", "the command says trainer.num_nodes 2"),
        ("python -m verl.trainer.main_ppo +trainer.nnodes=2", "the command says +trainer.nnodes 2"),
        ("python t.py --trainer.num_nodes 2", "the command says --trainer.num_nodes 2"),
        ("./start -H a:8,b:8", "the command says -H with 2 hosts"),
        ("./start --hostfile /shared/hosts", "the command says --hostfile /shared/hosts"),
        ("nsys profile torchrun --nnodes 2 t.py", "the command says --nnodes 2"),
        ("docker run img torchrun --nnodes=2 t.py", "the command says --nnodes 2"),
        ("bash -lc 'cd x && torchrun --nnodes=2 t.py'", "the command says --nnodes 2"),
        ("bash -c 'torchrun --nnodes ${N} t.py'", ""),
        ("env NNODES=2 bash run.sh", "the command says NNODES=2"),
        ("vllm serve m --data-parallel-size 4 --data-parallel-address 10.0.0.5",
         "the command says --data-parallel-address 10.0.0.5"),
        ("vllm serve m --data-parallel-address '' --headless",
         "the command says --data-parallel-address, which is empty; is its shell variable set?"),
        ("mpirun -np 2 -host a,b python t.py", "the command says -host with 2 hosts"),
        ("mpirun -np 16 -H a:8,b:8 python t.py", "the command says -H with 2 hosts"),
        ("mpiexec -f hosts -n 4 python t.py", "the command says -f hosts"),
        ("srun -N2 python t.py", "the command says -N 2"),
        ("srun --nodes=2 python t.py", "the command says --nodes 2"),
        ("srun python t.py", "srun starts tasks elsewhere"),
        ("sbatch job.sh", "sbatch starts tasks elsewhere"),
        ("torchx run -s slurm dist.ddp -j 2x8 --script t.py", "torchx starts tasks elsewhere"),
        ("torchx run dist.ddp -j 1x8 --script t.py", "torchx starts tasks elsewhere"),
        ("sky launch -c mine job.yaml", "sky starts tasks elsewhere"),
        ("condor_submit job.sub", "condor_submit starts tasks elsewhere"),
        ("oarsub -l nodes=2 ./t.sh", "the command says nodes 2"),
        ("ray start --head", "ray starts tasks elsewhere"),
        ("ray start --address=10.0.0.5:6379", "the command says --address 10.0.0.5"),
        # content with this host
        ("python train.py", ""),
        ("python train.py --nnodes 1 --node-rank 0 --master-addr node0", ""),
        ("python train.py --node-rank 0 --master-addr 127.0.0.1", ""),
        ("python train.py --dist-url tcp://localhost:99 --init-method env://", ""),
        ("python train.py --init-method file:///shared/x --nnodes $N", ""),
        ("curl -H 'Accept: text/html, */*' u", ""),
        ("vllm serve m --host 0.0.0.0 --tensor-parallel-size 8", ""),
        ("mpirun -np 2 python t.py", ""),
        ("mpirun -np 2 --host localhost python t.py", ""),
        ("srun -N 1 python t.py", ""),
        ("torchx run -s local_cwd dist.ddp -j 2x1 --script t.py", ""),
        ("torchx run --scheduler=local_cwd dist.ddp -j 1x2 --script t.py", ""),
        ("python train.py --nodes 99999999999999999999", ""),
    ],
)  # fmt: skip
def test_what_a_line_says_of_other_hosts(line: str, words: str):
    assert job(line).unread.said == words


def test_a_step_of_slurm_has_the_hosts_of_its_allocation():
    of_two = {"SLURM_JOB_NUM_NODES": "2"}
    assert job("srun python t.py", **of_two).unread.said == "the command says SLURM_JOB_NUM_NODES=2"
    assert job("srun -N 1 python t.py", **of_two).unread == UnreadHosts()
    assert job("srun python t.py", SLURM_JOB_NUM_NODES="1").unread == UnreadHosts()
    assert job("python t.py", **of_two).unread == UnreadHosts(), "only srun would leave this host"


def test_launchers_that_are_read_leave_nothing_unread():
    assert job("torchrun --nnodes 2 --node-rank 0 --master-addr a t.py").unread == UnreadHosts()


@each_row(
    ("line", "words"),
    [
        ("ray start --head", "ray starts no ranks by itself"),
        ("ray job submit -- python t.py", "ray starts no ranks by itself"),
        ("kubectl apply -f job.yaml", "before the program that it starts there"),
        ("sbatch job.sh", "before the program that it starts there"),
    ],
)
def test_no_advice_names_a_command_that_a_program_does_not_have(line: str, words: str):
    found = job(line)
    assert said(found, words)
    assert not said(found, "nccl-doctor run -- COMMAND")


@each_row(
    ("unread", "fix"),
    [
        (
            UnreadHosts("the command says --nnodes 2", nnodes="2"),
            "# --nnodes 2 --node-rank NUMBER --master-addr ADDRESS",
        ),
        (
            UnreadHosts("x", nnodes="2", master_addr="10.0.0.5"),
            "# --nnodes 2 --node-rank NUMBER --master-addr 10.0.0.5",
        ),
        (UnreadHosts("x", hostfile="/shared/my hosts"), "# --hostfile '/shared/my hosts'"),
        (UnreadHosts("x", starter="srun"), "# srun nccl-doctor run -- COMMAND"),
    ],
)
def test_the_fix_gives_what_the_line_leaves_open(unread: UnreadHosts, fix: str):
    (found,) = unread_hosts(unread)
    assert found.message == f"only this host was examined: {unread.said}"
    assert [step.command for step in found.fix.steps] == [fix]


def test_the_verdict_is_unknown_and_the_job_starts_unless_strict():
    cluster = make_cluster(("nd0",), check="shm", by_host={"nd0": OK})
    (found,) = unread_hosts(UnreadHosts("the command says --nnodes 2", nnodes="2"))
    for strict, code in ((False, 0), (True, 3)):
        report = through_json(
            conclude(cluster, [made_check("shm")], run=RUN, problems=[found], strict=strict)
        )
        assert (report.verdict, report.exit_code) == ("unknown", code)
        assert [each.code for each in report.root_causes] == ["hosts-not-examined"]
        assert report.root_causes[0].where.hosts == ()
        assert HOSTS_NOT_EXAMINED.title in report.summary


def test_what_else_is_unknown_or_broken_still_holds_the_job_back():
    cluster = make_cluster(("nd0",), check="shm", by_host={"nd0": OK}, complete=False)
    (found,) = unread_hosts(UnreadHosts("the command says --nnodes 2", nnodes="2"))
    report = conclude(cluster, [made_check("shm")], run=RUN, problems=[found])
    assert (report.verdict, report.exit_code) == ("unknown", 3)


def test_hosts_that_are_not_read_travel_with_the_job():
    unread = UnreadHosts("the command says --nnodes 2", nnodes="2", master_addr="a")
    assert decode(Job, Node("job", encode(Job(unread=unread)))).unread == unread
    assert decode(Job, Node("job", {})).unread == UnreadHosts()
