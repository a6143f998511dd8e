"""The simulator, asked by actions instead of by their positions."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change, simulate_positions
from sppo_hf.schedule.timeline import Timeline


def simulate(
    resources: Mapping[str, Sequence[Action]],
    *,
    seconds: Callable[[Action], float],
    after: Callable[[Action], Iterable[Action]],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Simulate resources: `after` says what each action waits for, `seconds` how long it is."""
    actions = [action for resource in resources.values() for action in resource]
    places = {action: place for place, action in enumerate(actions)}
    return simulate_positions(
        resources,
        seconds=list(map(seconds, actions)),
        needs=[[places[other] for other in after(action)] for action in actions],
        changes=changes,
        standing=standing,
    )
