"""A SLURM of two nodes on this machine, in namespaces of its own, which end with whoever has made it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from machines import wait_until

HERE = Path(__file__).parent
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "unshare", "nsenter")
_AGAIN_S = 8.0
_CONFIG = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MpiDefault=none
JobRequeue=1
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,requeue_setup_env_fail
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_BEGIN = """
for each in /run/munge /var/log/munge /var/lib/munge /etc/munge; do
    mkdir -p $each && mount -t tmpfs tmp $each && chown munge $each && chmod 755 $each; done
chmod 700 /etc/munge && dd if=/dev/urandom bs=1 count=1024 of=/etc/munge/munge.key 2>/dev/null
chown munge /etc/munge/munge.key && chmod 400 /etc/munge/munge.key
su -s /bin/sh munge -c '/usr/sbin/munged --force' && slurmctld && slurmd -N n0 && slurmd -N n1
echo ready && exec cat
"""


def missing() -> str:
    """Returns what this machine lacks for a SLURM of its own, "" if nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if absent := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        return f"{', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "to be root"


class Slurm:
    """Two nodes, n0 and n1. A context manager; for one thread."""

    def __init__(self, folder: Path) -> None:
        self._asked_s = -_AGAIN_S  # when a job was let begin last
        self.folder, self.work = folder / "slurm", folder / "work"
        for path in (self.folder / "log", self.folder / "state", self.work):
            path.mkdir(parents=True)
        host, first = os.uname().nodename.partition(".")[0], 40_000 + os.getpid() % 10_000
        ports = {"port": first, "first": first + 1, "last": first + 2}
        config = self.folder / "slurm.conf"
        config.write_text(_CONFIG.format(host=host, folder=self.folder, **ports))
        # What a user has whose shell finds `seedbed`.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(config), "PATH": path, "COLUMNS": "200",
        }  # fmt: skip
        self._outer = subprocess.Popen(
            ["unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc", "bash", "-c", _BEGIN],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment,
        )  # fmt: skip
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n", "SLURM has not begun"
        self._init = psutil.Process(self._outer.pid).children()[0].pid
        wait_until(lambda: self.call("sinfo -h -t idle -o %D").strip() == "2", "two idle nodes", 30)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *failure: object) -> None:
        self._outer.kill()
        self._outer.communicate()

    def _enter(self, command: str) -> list[str]:
        return [
            "nsenter",
            "-m",
            "-p",
            "-t",
            str(self._init),
            "--wd=" + str(self.work),
            "bash",
            "-c",
            command,
        ]

    def call(self, command: str, seconds: float = 60.0) -> str:
        """Runs a command in the cluster, and returns what it says; raises CalledProcessError."""
        done = subprocess.run(
            self._enter(command),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
        return done.stdout

    def run(self, command: str, seconds: float) -> tuple[int, str]:
        """Runs a command of a user's; returns its status and all that it says."""
        done = subprocess.run(
            self._enter(f"{command} 2>&1"),
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds,
        )  # fmt: skip
        return done.returncode, done.stdout

    def submit(self, command: str) -> int:
        """Submits a job; returns its number. Its output is `said(number)`."""
        return int(self.call(command.replace("sbatch ", "sbatch --parsable -o %j.log ", 1)))

    def said(self, job: int | str) -> str:
        """Returns what a job has printed."""
        path = self.work / f"{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: int) -> str:
        """Returns the state of a job, "" if it is forgotten."""
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.call(f"squeue -h -t all -j {job} -o %T").split("\n")[0]
        return ""

    def begins(self, job: int) -> bool:
        """Lets a job that waits for its time begin now; returns whether it has."""
        if time.monotonic() > self._asked_s + _AGAIN_S:
            self._asked_s = time.monotonic()
            # SLURM refuses it while the job still ends; and each new time of a start is a second away.
            with contextlib.suppress(subprocess.CalledProcessError):
                self.call(f"scontrol update JobId={job} StartTime=now")
        return self.state(job) == "RUNNING"

    def processes(self, word: str) -> list[psutil.Process]:
        """Returns the processes of the cluster with a word in their command line, the oldest first."""
        found = psutil.Process(self._init).children(recursive=True)
        mine: list[psutil.Process] = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                if any(word in each for each in process.cmdline()):
                    mine.append(process)
        return sorted(mine, key=lambda each: each.create_time())

    def end_node(self, name: str) -> None:
        """Kills the daemon of a node, of which the others hear nothing any more."""
        for process in self.processes("slurmd"):
            if name in process.cmdline():
                process.kill()
