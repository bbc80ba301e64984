"""Each error has one status, survives the wire, and stays small."""

import pickle

import grpc
import pytest
from google.rpc import error_details_pb2

from paceline.cluster.front import errors
from paceline.worker import errors as tree

ALL = [
    (tree.InvalidRequest("bad", "top_p"), grpc.StatusCode.INVALID_ARGUMENT, 400),
    (tree.NotFound("no", "model"), grpc.StatusCode.NOT_FOUND, 404),
    (tree.AlreadyExists("twice"), grpc.StatusCode.ALREADY_EXISTS, 409),
    (errors.Unauthenticated("who"), grpc.StatusCode.UNAUTHENTICATED, 401),
    (errors.PermissionDenied("not you"), grpc.StatusCode.PERMISSION_DENIED, 403),
    (errors.TooLarge("big"), grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    (tree.Overloaded("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (tree.Unavailable("gone", 0.25), grpc.StatusCode.UNAVAILABLE, 503),
    (tree.DeadlineExceeded("late", "queue"), grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (errors.Cancelled("stop"), grpc.StatusCode.CANCELLED, 499),
    (errors.Unsupported("never"), grpc.StatusCode.UNIMPLEMENTED, 501),
    (tree.ConfigError("wrong"), grpc.StatusCode.FAILED_PRECONDITION, 400),
    (tree.StaleEpoch("old"), grpc.StatusCode.FAILED_PRECONDITION, 409),
    (tree.InternalError("oops"), grpc.StatusCode.INTERNAL, 500),
]
IDS = [type(error).__name__ for error, _, _ in ALL]


def as_rpc_error(error: tree.PacelineError) -> grpc.aio.AioRpcError:
    status = errors.to_status(error)
    code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
    trailing = grpc.aio.Metadata((errors.DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=status.message)


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_error_of_the_tree_is_mapped() -> None:
    """A class elsewhere answers as the one it is made from."""
    modules = (tree.__name__, errors.__name__)
    own = {c for c in subclasses(tree.PacelineError) if c.__module__ in modules}
    assert own - {tree.PacelineError} == {type(error) for error, _, _ in ALL}


@pytest.mark.parametrize(("error", "code", "http"), ALL, ids=IDS)
def test_an_error_has_its_status_over_both_faces(
    error: tree.PacelineError, code: grpc.StatusCode, http: int
) -> None:
    assert errors.to_status(error).code == code.value[0]
    answer = errors.to_http(error)
    assert answer.status == http
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}
    assert ("Retry-After" in answer.headers) == (http in (429, 503))


@pytest.mark.parametrize("error", [error for error, _, _ in ALL], ids=IDS)
def test_an_error_survives_the_wire_and_pickle(error: tree.PacelineError) -> None:
    for other in (
        errors.from_rpc_error(as_rpc_error(error)),
        pickle.loads(pickle.dumps(error)),
    ):
        assert type(other) is type(error)
        assert other.args == error.args


@pytest.mark.parametrize("letter", ["x", "é", "😀", '"'])
def test_details_stay_under_4_kib(letter: str) -> None:
    error = tree.InvalidRequest(letter * 100_000, letter * 100_000)
    status = errors.to_status(error, req_id="r" * 1000)
    assert status.ByteSize() <= 4096
    assert len(status.message.encode()) <= errors.MAX_MESSAGE_BYTES
    assert status.message.endswith("...")


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, tree.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, tree.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.TooLarge),
        (grpc.StatusCode.UNKNOWN, tree.InternalError),
    ],
)
def test_a_status_that_is_not_ours_becomes_the_closest_error(
    code: grpc.StatusCode, cls: type[tree.PacelineError]
) -> None:
    foreign = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="text")
    assert type(errors.from_rpc_error(foreign)) is cls
    assert not errors.is_ours(foreign)
    assert errors.is_ours(as_rpc_error(tree.NotFound("x")))


def test_a_retry_is_called_safe_only_before_the_first_token() -> None:
    for num_tokens, is_safe in ((0, "true"), (3, "false")):
        status = errors.to_status(tree.Unavailable("gone"), num_tokens_sent=num_tokens)
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.metadata["safe_to_retry"] == is_safe
