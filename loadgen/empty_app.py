"""A Serve application that does nothing: what Ray and Serve cost without this project's part (`idle-cost --empty`)."""

from ray import serve
from starlette.requests import Request


class Empty:
    """Lists no models."""

    async def __call__(self, _: Request) -> dict[str, object]:
        return {"object": "list", "data": []}


application = serve.deployment(Empty, ray_actor_options={"num_cpus": 0}).bind()
