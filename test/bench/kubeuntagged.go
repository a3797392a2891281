//go:build !system

package main

import "context"

// kubePods needs the real Kubernetes of the tests, too.
func kubePods(ctx context.Context, set settings, r *testbed, s *sheet) error {
	return inCluster(ctx, set, r, s)
}

func serveNode(string, string) error { return inCluster(context.Background(), settings{}, nil, nil) }
