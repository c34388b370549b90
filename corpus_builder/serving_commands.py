"""The commands that ask a corpus or serve it: bench, serve."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator

import ray

from cluster.ray_connection import ClusterError, NoCluster, connect
from cluster.retrieval import Corpus, CorpusError
from cluster.retrieval.actor import running_actors, start_actors, stop_actors
from cluster.retrieval.client import ActorCorpus, RetrievalConfig
from cluster.retrieval.storage import Location, read_manifest
from corpus_builder.bench import Questions, growth, measure, text_of
from corpus_builder.ray_steps import ray_session


def bench_command(args: argparse.Namespace) -> int:
    """bench: time of a lookup."""
    if args.corpus:
        corpus = Corpus.open(args.corpus)
        questions = Questions(text_of(args.corpus, corpus), args.keys, corpus.sizes[-1], seed=0)
        print(measure(f"in place, {args.keys} keys", corpus, questions, args.max_nodes), flush=True)
        if args.actors:
            with ray_session(args.ray_address, 1):
                served = running_actors(read_manifest(Location.parse(args.corpus)).corpus_id)
                manifest = start_actors(args.corpus)
                config = RetrievalConfig(corpus=args.corpus, mode="actors", deadline_ms=1000)
                label = f"{len(manifest.shards)} actors, {args.keys} keys"
                print(measure(label, ActorCorpus(config), questions, args.max_nodes), flush=True)
                if not served:
                    stop_actors(manifest.corpus_id)
    if args.grow:
        timings = list(growth(args.grow, args.keys, args.max_nodes))
        for timing in timings:
            print(timing)
        print(f"largest over smallest: {timings[-1].median_us / timings[0].median_us:.2f} ×")
    if not args.corpus and not args.grow:
        raise CorpusError("name a corpus to measure, or use --grow")
    return 0


def serve_command(args: argparse.Namespace) -> int:
    """serve: start a corpus' actors, or stop them."""
    manifest = read_manifest(Location.parse(args.corpus))
    with _cluster(args.ray_address) as own:
        where = f"corpus {manifest.corpus_id} on the Ray cluster at {ray.get_runtime_context().gcs_address}"
        if args.stop:
            print(f"stopped {stop_actors(manifest.corpus_id)} actors of {where}")
            return 0
        start_actors(args.corpus, replicas=args.replicas)
        print(f"{len(manifest.shards) * args.replicas} actors hold {where}", flush=True)
        if own:
            print("they live as long as this process, as no cluster was running; end it with Ctrl-C", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[bool]:
    """A connection to the running cluster, or to a new local one (True)."""
    own = False
    if address is None and "RAY_ADDRESS" not in os.environ:
        try:
            connect("auto")
        except NoCluster:
            own = True
        except ClusterError as error:
            raise CorpusError(str(error)) from error
    with ray_session(address, 1):
        yield own
