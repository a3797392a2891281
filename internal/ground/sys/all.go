package sys

import (
	"iter"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// All makes a call for each key, all at once, and returns what they came to. Those that take longer, as in a kernel that
// hangs, go on: they are late.
func All[K comparable, V any](keys []K, within time.Duration, call func(K) V) (ended map[K]V, late []K) {
	type outcome struct {
		key K
		of  V
	}
	out := make(chan outcome, len(keys))
	for _, key := range keys {
		go func() { out <- outcome{key, call(key)} }()
	}
	ended = make(map[K]V, len(keys))
	for over := time.After(within); len(ended) < len(keys); {
		select {
		case one := <-out:
			ended[one.key] = one.of
		case <-over:
			return ended, slices.DeleteFunc(slices.Clone(keys), func(key K) bool { _, is := ended[key]; return is })
		}
	}
	return ended, nil
}

// Each makes a call for each of all, at most so many at once, and returns when all have ended.
func Each[K, V any](atOnce int, all iter.Seq2[K, V], call func(K, V)) {
	var group errgroup.Group
	group.SetLimit(atOnce)
	for k, v := range all {
		group.Go(func() error { call(k, v); return nil })
	}
	_ = group.Wait() // no call fails
}

// Map returns what a call makes of each of all: nil if there are none.
func Map[T, V any](all []T, call func(T) V) (out []V) {
	for _, one := range all {
		out = append(out, call(one))
	}
	return out
}
