"""The command `fuseplan driver`: MIOpenDriver's letters, one line or a file of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fuseplan.cli.options import AS_JSON, PATIENCE, PLAN, TARGET, THREADS, Command, completing
from fuseplan.cli.screen import Screen
from fuseplan.cli.statuses import RIGHT, WRONG, error_json, known_error, status_of
from fuseplan.compat.miopen_driver.letters import BY_WORD, LETTERS, PROBLEMS, Letter
from fuseplan.compat.miopen_driver.problem import Problem, command_of
from fuseplan.compat.miopen_driver.report import driver_report
from fuseplan.compat.miopen_driver.run import Driven, Seconds, drive
from fuseplan.compat.miopen_driver.sweep import Line, all_combinations, is_plan, lines_of, words_of
from fuseplan.errors import ArgumentError, FuseplanError, Unsupported, counted, refusing
from fuseplan.kernels.match import match
from fuseplan.measure.machine import commit, machine, versions
from fuseplan.plans.plan import FusionPlan
from fuseplan.tuning.verdict import Verdict

SAID = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
HOW = ("target", "threads", "verify", "time", "wall", "iter", "unfused", "patience")  # a plan is run
OF_ALL_LINES = ("sweep", "is_all", "every", "report", "as_json")  # not for one of many lines


@dataclass(frozen=True)
class Outcome:
    """The outcome of a line, or of the one problem: its run, or the error."""

    line: Line | None
    driven: Driven | None = None
    error: Exception | None = None

    @property
    def status(self) -> int:
        """The exit status of the line by itself."""
        if self.error is not None:
            return status_of(self.error)
        return RIGHT if self.driven is not None and self.driven.is_right else WRONG

    def to_json(self) -> dict[str, Any]:
        """The run or the error as JSON values; for one of many lines also the line and its place."""
        which = {"line": self.line.text, "place": self.line.place} if self.line else {}
        told = self.driven.to_json() if self.driven else {"right": False}
        return {**which, **told, **(error_json(self.error) if self.error else {})}


def _letter_option(letter: Letter) -> click.Option:
    told = f"{letter.meaning}: {letter.wanted}."
    kind = "WORD" if letter.words else "NUMBER"
    default = None if letter.default == "" else letter.written(letter.default)
    return click.Option(
        [*letter.flags, letter.word], help=told, metavar=kind, default=default, show_default=True
    )


def _switch(letter: str, word: str, default: int, told: str) -> Callable[[Command], Command]:
    """An option that is 0 or 1, as MIOpenDriver has them."""
    return click.option(
        f"-{letter}", f"--{word}", type=click.IntRange(0, 1), default=default, show_default=True, help=told
    )


@click.command("driver")
@click.argument(
    "problem", metavar="[PROBLEM_OR_PLAN]", required=False, type=PLAN, **completing(lambda: PROBLEMS)
)
@TARGET
@THREADS
@_switch("V", "verify", 1, "1 compares the result with float64, within the bound that the kernel states.")
@_switch("t", "time", 0, "1 measures the kernel's time: by a GPU's own clock, by the host's on a CPU.")
@_switch("w", "wall", 0, "1 measures the host's time until the result is there.")
@click.option(
    "-i", "--iter", type=click.IntRange(1), default=1, show_default=True,
    help="The number of timed calls; some untimed calls come before them.",
)  # fmt: skip
@click.option(
    "--unfused", is_flag=True, help="Measure the operators one at a time, and eager PyTorch, beside the plan."
)
@PATIENCE
@click.option(
    "-D", "--dot_graph", type=click.Path(path_type=Path), help="Write the plan and its match for Graphviz."
)
@click.option(
    "--sweep", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Run each line of a file."
)
@click.option("--all", "is_all", is_flag=True, help="Run every combination of operators, on small tensors.")
@click.option("--every", type=click.IntRange(1), default=1, help="Run only every Nth line of many.")
@click.option(
    "--report", type=click.Path(path_type=Path, file_okay=False), help="Write a report into a folder."
)
@AS_JSON
@click.pass_context
def driver_command(ctx: click.Context, /, report: Path | None, as_json: bool, **_: Any) -> None:
    """Run a fusion problem in MIOpenDriver's letters, on random data.

    The problems are CBAInfer, CBAInferfp16, CBAInferbfp16, CAInfer, CAInferfp16 and CAInferbfp16; a plan may
    stand in the place of a problem. --sweep runs each line of a file, and --all every combination. The other
    options are then for all lines.

    Exit status: 1 also if one of many lines fails.
    """
    lines = _lines(ctx)
    if lines is None:
        outcome = _outcome(ctx, None)
        if outcome.error is not None and not as_json:
            raise outcome.error
        if as_json:
            click.echo(json.dumps(outcome.to_json()))
        else:
            Screen().tell(_told(outcome))
        ctx.exit(outcome.status)
    if report is not None:
        with refusing(f"--report {report} cannot be made"):
            report.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    records: list[dict[str, Any]] = []
    try:
        for outcome in _swept(ctx, lines):
            records.append(outcome.to_json())
            click.echo(json.dumps(records[-1]) if as_json else _told_shortly(outcome))
    finally:  # an interrupted run reports its findings too
        seconds, failed = time.monotonic() - begin, sum(not record["right"] for record in records)
        if report is not None:
            _write(report, _head(ctx, records, seconds, len(lines)), records)
        if not as_json:
            click.echo(f"{counted(len(records), 'line')}, {failed} failed, {seconds:.0f} s")
    ctx.exit(WRONG if failed else RIGHT)


driver_command.params[1:1] = map(_letter_option, LETTERS)


def _lines(ctx: click.Context) -> Sequence[Line] | None:
    """The lines of a file, its comments left out, or of every combination; None where there is one problem.

    Raises:
        ArgumentError: more than one of them is asked for, or an option belongs to another; the file cannot
            be read, or holds no line.
    """
    sweep, is_all, problem = ctx.params["sweep"], ctx.params["is_all"], ctx.params["problem"]
    if (sweep is not None) + is_all + (problem is not None) > 1:
        raise ArgumentError("a problem, --sweep FILE and --all exclude each other: give one")
    said = _said(ctx)
    if sweep is None and not is_all:
        if "report" in said or "every" in said:
            raise ArgumentError("--report and --every are for many lines: want --sweep FILE or --all")
        return None
    if "dot_graph" in said:
        raise ArgumentError("-D, --dot_graph draws one plan: leave --sweep and --all out")
    lines = lines_of(sweep) if sweep is not None else all_combinations()
    return lines[:: ctx.params["every"]]


def _swept(ctx: click.Context, lines: Sequence[Line]) -> Iterator[Outcome]:
    """Each line run."""
    handed = {name: ctx.params[name] for name in _said(ctx) if name not in OF_ALL_LINES}
    for line in lines:
        try:
            words = words_of(line)
            inner = driver_command.make_context("driver", words, default_map=handed, help_option_names=[])
            _check_line(inner)
        except click.ClickException as error:
            yield Outcome(line, error=ArgumentError(error.format_message()))
        except ArgumentError as error:
            yield Outcome(line, error=error)
        else:
            with inner:
                yield _outcome(inner, line)


def _check_line(inner: click.Context) -> None:
    """Refuses options without a meaning in one of many lines; an ArgumentError where there is one."""
    found = [name for name in _said(inner) if name in OF_ALL_LINES]
    if found:
        flags = ", ".join(each.opts[-1] for each in driver_command.params if each.name in found)
        raise ArgumentError(f"{flags}: give it beside --sweep, not in a line of the sweep")


def _said(ctx: click.Context) -> list[str]:
    """The parameters that the command line says, or that of the sweep which it is in."""
    return [name for name in ctx.params if ctx.get_parameter_source(name) in SAID]


def _outcome(ctx: click.Context, line: Line | None) -> Outcome:
    try:
        return Outcome(line, driven=_driven(ctx))
    except (FuseplanError, MemoryError) as error:
        return Outcome(line, error=known_error(error))


def _driven(ctx: click.Context) -> Driven:
    given, plan = ctx.params, plan_of(ctx)
    if given["dot_graph"] is not None:
        _draw(plan, given["dot_graph"])
    return drive(plan, **{name: given[name] for name in HOW})


def plan_of(ctx: click.Context) -> FusionPlan:
    """The plan of a parsed line: of a problem's letters, or of a plan's text.

    Raises:
        PlanError: it is none.
        ArgumentError: no problem is named, or letters are given beside a plan's text.
    """
    problem = ctx.params["problem"]
    said = {name: ctx.params[name] for name in _said(ctx) if name in BY_WORD}
    if problem is None:
        raise ArgumentError(
            f"no problem is named; want {', '.join(PROBLEMS)}, a plan's text, or --sweep FILE"
        )
    if not is_plan(problem):
        src, ops = Problem(problem, said).plan()
        return FusionPlan(src, *ops)
    own = [word for word in said if ctx.get_parameter_source(word) is ParameterSource.COMMANDLINE]
    if own:  # letters of the whole sweep are for its other lines
        flags = ", ".join(BY_WORD[word].flag for word in own)
        raise ArgumentError(f"a plan's text is the whole plan: leave {flags} out")
    return FusionPlan.parse(problem)


def _draw(plan: FusionPlan, place: Path) -> None:
    """Writes the plan's graph, with its match where it has one."""
    try:
        graph = match(plan).to_dot()
    except Unsupported:
        graph = plan.to_dot()
    with refusing(f"--dot_graph {place} cannot be written"):
        place.write_text(graph)


def _head(
    ctx: click.Context, records: Sequence[dict[str, Any]], seconds: float, asked: int
) -> dict[str, Any]:
    """The run's target, machine, versions and date, by name."""
    where = dict.fromkeys(record["processor"] for record in records if "processor" in record)
    return {
        "target": ctx.params["target"],
        "processor": ", ".join(where),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine().to_json(),
        **versions("torch", "triton"),
        "commit": commit(),
        "seconds": round(seconds),
        **({"not run": asked - len(records)} if len(records) < asked else {}),
    }


def _write(folder: Path, head: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Writes report.md and report.json."""
    with refusing(f"--report {folder} cannot be written"):
        (folder / "report.json").write_text(json.dumps({**head, "lines": records}, indent=1) + "\n")
        (folder / "report.md").write_text(driver_report(head, records))


def _told(outcome: Outcome) -> str:
    driven = outcome.driven
    assert driven is not None
    compiled = driven.compiled
    lines = [
        f"plan       {compiled.plan}",
        f"command    {command_of(compiled.plan)}",
        f"target     {compiled.target}, {compiled.target.shape}",
        f"template   {compiled.choice}",
        f"kernels    {compiled.kernels} for {counted(len(compiled.plan), 'operator')}",
        *(f"error      {each}: {'right' if each.is_right else 'WRONG'}" for each in driven.checks),
        *(() if driven.checks else ["error      not compared with float64"]),
    ]
    lines += [f"{name:<10} {_ms(taken)}" for name, taken in _times(driven)]
    return "\n".join([*lines, *_unfused(driven.verdict)])


def _unfused(verdict: Verdict | None) -> list[str]:
    """The verdict, its first line behind a label."""
    if verdict is None:
        return []
    first, *others = str(verdict).splitlines()
    return [f"unfused    {first}", *(f"         {line}" for line in others)]


def _times(driven: Driven) -> list[tuple[str, Seconds]]:
    return [(name, taken) for name, taken in (("kernel", driven.kernel), ("wall", driven.wall)) if taken]


def _ms(taken: Seconds) -> str:
    return f"{taken.least * 1e3:.4f} ms at least, {taken.mean * 1e3:.4f} ms on average of {taken.calls}"


def _told_shortly(outcome: Outcome) -> str:
    """One line; an error's place and message below it."""
    driven, line = outcome.driven, outcome.line
    assert line is not None
    if driven is None:
        message = "\n".join(f"    {each}" for each in str(outcome.error).splitlines())
        return f"FAILED  {line.text}\n    {line.place}\n{message}"
    times = "".join(f"  {name} {taken.mean * 1e3:.4f} ms" for name, taken in _times(driven))
    if driven.verdict is not None:
        times += f"  {_compared(driven.verdict)}"
    verdict = "right " if driven.is_right else "WRONG "
    error = f"  {max(each.error for each in driven.checks):.1e}" if driven.checks else ""
    return f"{verdict}{error}{times}  {line.text}"


def _compared(verdict: Verdict) -> str:
    """The gain of fusing, in a few words."""
    if verdict.disturbance:
        return f"no verdict: {verdict.disturbance}"
    if verdict.speedup is None:
        return "nothing to compare with"
    return f"{verdict.speedup:.2f} times as fast as {verdict.best_other}"
