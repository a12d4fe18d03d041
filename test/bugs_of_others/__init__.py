"""Public faults of other systems, as small programs whose right results are known."""

from bugs_of_others import layouts, losses, products, stages
from bugs_of_others.record import Bug

GROUPS: dict[str, list[Bug]] = {
    group.TITLE: group.BUGS for group in (layouts, products, losses, stages)
}
BUGS = [bug for bugs in GROUPS.values() for bug in bugs]
