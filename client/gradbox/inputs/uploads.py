"""What a job uploads: its tensors cut into blobs, and the references that its spec makes.

A client remembers the large tensors that it has sent: where each lies, and which names change. Such
a tensor is a blob of its own the first time, so that whoever has sent the same numbers before sends
nothing. Weights that a training loop changes would then be a request each in every step; so what
has been sent under its name before, with other numbers, travels in one blob with all that changed
beside it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from gradbox.errors import InvalidInputs
from gradbox.inputs.shards import ShardGroup
from gradbox.protocol import InputGroup, ShardRef, TensorRef
from gradbox.tensors.blob import Blob
from gradbox.tensors.tensor_bytes import TensorBytes, tensor_bytes

# Those of the last steps; one that was forgotten is sent again.
MOST_TENSORS: Final = 10_000


class SentTensor(NamedTuple):
    """A tensor on its way to the box.

    `name` is what the job calls it, and `digest` that of a blob which holds it alone.
    """

    name: str
    digest: str
    ref: TensorRef


class KnownTensors:
    """What one client knows of the tensors on its box. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refs: OrderedDict[str, TensorRef] = OrderedDict()  # by digest
        self._names: set[str] = set()

    def ref(self, digest: str) -> TensorRef | None:
        """Return where a tensor lies on the box; None if it was not sent."""
        with self._lock:
            found = self._refs.get(digest)
            if found is not None:
                self._refs.move_to_end(digest)
            return found

    def was_sent(self, name: str) -> bool:
        """Tell whether a tensor was sent under this name before."""
        with self._lock:
            return name in self._names

    def note(self, tensors: Iterable[SentTensor]) -> None:
        """Remember tensors: the box has taken a job that names them."""
        with self._lock:
            for tensor in tensors:
                self._refs[tensor.digest] = tensor.ref
                self._refs.move_to_end(tensor.digest)
                self._names.add(tensor.name)
            while len(self._refs) > MOST_TENSORS:
                self._refs.popitem(last=False)

    def forget(self) -> None:
        """Know of none: some were removed from the box."""
        with self._lock:
            self._refs.clear()
            self._names.clear()


# Shards are pooled up to this size: a thousand small shards are a few requests.
PACK_BYTES: Final = 64 * 2**20
# A single tensor from this size on is not sent again while it does not change, whatever its
# neighbours do: it is a blob of its own, named by its numbers alone, or see `KnownTensors`.
LONE_BYTES: Final = 64 * 2**10
LONE_NAME: Final = "tensor"
MAX_NAME_CHARACTERS: Final = 500


class Uploads:
    """Collects the blobs of one job, each once."""

    def __init__(self, known: KnownTensors | None = None) -> None:
        """Collect for a job.

        Args:
            known: what the client has sent before.
        """
        self._known = known or KnownTensors()
        self._blobs: dict[str, Blob] = {}
        self.large: list[SentTensor] = []

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return tuple(self._blobs.values())

    def groups(self, groups: Iterable[ShardGroup]) -> list[InputGroup]:
        """Pool shards into blobs, tensors named GROUP/INDEX/ARGUMENT.

        Groups of one shard are pooled with each other, larger ones each by itself: a tower whose
        shards did not change is not sent again.
        """
        groups = list(groups)
        refs = self._pooled([group for group in groups if len(group.shards) == 1])
        for group in groups:
            if len(group.shards) > 1:
                refs |= self._pooled([group])
        found = []
        for group in groups:
            order = None if group.order is None else self.tensors({"order": group.order})["order"]
            shards, method = refs[group.name], group.method
            found.append(InputGroup(name=group.name, shards=shards, method=method, order=order))
        return found

    def tensors(self, tensors: Mapping[str, TensorBytes]) -> dict[str, TensorRef]:
        """Pool small tensors, and large ones that have changed; gives a reference for each name.

        Raises:
            InvalidInputs: a name is one that no file can hold.
        """
        _check_names(tensors)
        small = {n: t for n, t in tensors.items() if t.size_bytes < LONE_BYTES}
        refs = self._large({n: t for n, t in tensors.items() if n not in small})
        for pack in _packs({name: small[name].size_bytes for name in sorted(small)}):
            digest = self._add(Blob({name: small[name] for name in pack}))
            refs |= {name: TensorRef(blob=digest, tensor=name) for name in pack}
        return {name: refs[name] for name in tensors}

    def named(self, given: Mapping[str, Any], *, where: str) -> dict[str, TensorRef]:
        """Pool tensors as they were handed in; gives a reference for each name.

        Args:
            where: what an error calls all of them: `where` stands before a name in brackets.

        Raises:
            InvalidInputs: one is no tensor, or its name is one that no file can hold.
        """
        return self.tensors(
            {name: tensor_bytes(value, where=f"{where}[{name!r}]") for name, value in given.items()}
        )

    def _large(self, tensors: Mapping[str, TensorBytes]) -> dict[str, TensorRef]:
        """Refer to what the box has, pool what has changed, and keep all else apart."""
        lone = {name: Blob({LONE_NAME: tensor}) for name, tensor in tensors.items()}
        by_digest: dict[str, TensorRef] = {}
        changed: dict[str, TensorBytes] = {}  # by digest, too
        for name, blob in lone.items():
            ref = self._known.ref(blob.digest)
            if ref is not None:
                by_digest[blob.digest] = ref
            elif self._known.was_sent(name):
                changed[blob.digest] = tensors[name]
        for pack in _packs({digest: changed[digest].size_bytes for digest in sorted(changed)}):
            if len(pack) > 1:
                pooled = self._add(Blob({digest: changed[digest] for digest in pack}, is_new=True))
                by_digest |= {digest: TensorRef(blob=pooled, tensor=digest) for digest in pack}
        for blob in lone.values():
            if blob.digest not in by_digest:
                by_digest[blob.digest] = TensorRef(blob=self._add(blob), tensor=LONE_NAME)
        refs = {name: by_digest[blob.digest] for name, blob in lone.items()}
        self.large += [SentTensor(name, lone[name].digest, ref) for name, ref in refs.items()]
        return refs

    def _pooled(self, groups: Iterable[ShardGroup]) -> dict[str, list[ShardRef]]:
        """Return the references to the groups' shards, by group."""
        places: dict[str, tuple[ShardGroup, int]] = {
            f"{group.name}/{index}/": (group, index)
            for group in groups
            for index in range(len(group.shards))
        }
        shards = {prefix: group.shards[index] for prefix, (group, index) in places.items()}
        refs: dict[str, list[ShardRef]] = {}
        for pack in _packs({p: sum(t.size_bytes for t in s.values()) for p, s in shards.items()}):
            digest = self._add(Blob({p + name: t for p in pack for name, t in shards[p].items()}))
            for prefix in pack:
                group, index = places[prefix]
                stream = group.streams[index] if group.streams else None
                ref = ShardRef(blob=digest, prefix=prefix, stream=stream)
                refs.setdefault(group.name, []).append(ref)
        return refs

    def _add(self, blob: Blob) -> str:
        self._blobs.setdefault(blob.digest, blob)
        return blob.digest


def _check_names(names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS:
            raise InvalidInputs(
                f"expected names of tensors with 1 to {MAX_NAME_CHARACTERS} characters, got "
                f"{name!r:.120}"
            )


def _packs(sizes_bytes: Mapping[str, int]) -> Iterable[list[str]]:
    """Cut names, in order, into runs of at most `PACK_BYTES` (or of one that is larger)."""
    pack: list[str] = []
    held_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if pack and held_bytes + size_bytes > PACK_BYTES:
            yield pack
            pack, held_bytes = [], 0
        pack.append(name)
        held_bytes += size_bytes
    if pack:
        yield pack
