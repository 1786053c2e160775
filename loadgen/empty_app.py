"""A Serve application that does nothing: what Ray and Serve cost without this project's part (`idle-cost --empty`)."""

from ray import serve
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Empty:
    """Lists no models."""

    async def __call__(self, _: Request) -> dict[str, object]:
        return {"object": "list", "data": []}


application = Empty.bind()
