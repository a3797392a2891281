package pods

import (
	"context"
	"errors"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// server is the current API server. It explains its errors.
type server struct {
	node   string // this node's name
	client atomic.Pointer[api]
}

// explain turns an error of the API server, or of the connection to it, into a sentence.
func (s *server) explain(err error) error {
	return apiserver.Explain(err, s.host(), s.node)
}

func (s *server) host() string {
	if client := s.client.Load(); client != nil {
		return client.host
	}
	return "of the kubeconfig"
}

// get gets one object. Errors name it what.
func (s *server) get(ctx context.Context, what, group, resource, namespace, name string, into runtime.Object) error {
	client := s.client.Load()
	if client == nil {
		return volume.Errorf(volume.Timeout, "%s is not known: no API server was asked yet", what)
	}
	if err := client.get(ctx, group, resource, namespace, name, into); err != nil {
		return s.unknown(what, err)
	}
	return nil
}

// unknown is why an object is not known. None of these reasons is final: a claim may be
// created, and the right to read it comes a moment after its pod.
func (s *server) unknown(what string, err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return volume.Errorf(volume.Busy, "%s does not exist", what)
	case apierrors.IsForbidden(err):
		return volume.Errorf(volume.Busy, "%s may not be read by our identity: %w", what, apiserver.Clipped(err))
	case errors.Is(err, context.DeadlineExceeded):
		return volume.Errorf(volume.Timeout, "%s is not known: the API server %s did not answer in time", what, s.host())
	default:
		return volume.Errorf(volume.Timeout, "%s is not known: %w", what, s.explain(err))
	}
}
