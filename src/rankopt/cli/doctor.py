"""`rankopt doctor`: what this machine has and lacks."""

from __future__ import annotations

import typer

from rankopt.cli.console import AsJson, Progress, print_json, print_table

app = typer.Typer()


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine and its packages; each problem comes with its fix.

    Exit code 0 when rankopt can work here, 2 when something that it needs is missing.
    """
    from rankopt.doctor import collect_findings, diagnose

    with Progress() as progress:
        progress.step("importing each package in a fresh process, compiling a small program")
        report = diagnose(collect_findings())
    if as_json:
        value = report.model_dump(mode="json")
        print_json(
            {"healthy": report.healthy, "fingerprint": report.environment.fingerprint()} | value
        )
    else:
        rows = [
            (check.status, check.name, check.found, f"fix: {check.fix}" if check.fix else "")
            for check in report.checks
        ]
        print_table(("", "check", "found", "fix"), rows)
        typer.echo("healthy" if report.healthy else "not healthy: mend the problems above")
    raise typer.Exit(report.exit_code)
