package pods

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// Trial is one thing that was tried, and what came of it.
type Trial struct {
	// What was tried, in the words of an error.
	What string
	Err  error
}

// Try tells whether pods can be looked up by an identity: whether it can be read,
// whether the API server answers, and gives the rights. It ends at the first thing
// without which the rest cannot be told.
func Try(ctx context.Context, who Identity, node string) []Trial {
	config, err := who.config()
	if err != nil {
		return []Trial{{"the identity can be read", err}}
	}
	client, err := newAPI(config)
	if err != nil {
		return []Trial{{"the identity can be used", err}}
	}
	defer client.client.CloseIdleConnections()
	asked := server{node: node}
	asked.client.Store(client)
	var out []Trial
	for _, one := range trials(client, node) {
		err := one.try(ctx)
		if err != nil {
			err = asked.explain(err)
		}
		out = append(out, Trial{one.what, err})
		if err != nil && apierrors.ReasonForError(err) == metav1.StatusReasonUnknown {
			break // it cannot be reached
		}
	}
	return out
}

type trial struct {
	what string
	try  func(ctx context.Context) error
}

func trials(client *api, node string) []trial {
	list := func(from *rest.RESTClient, resource string, selector fields.Selector, into runtime.Object) func(context.Context) error {
		return func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, getTime)
			defer cancel()
			_, err := client.list(ctx, from, resource, selector, metav1.ListOptions{Limit: 1}, into)
			return err
		}
	}
	return []trial{
		{fmt.Sprintf("the pods of node %s can be listed", node),
			list(client.core, "pods", fields.OneTermEqualSelector("spec.nodeName", node), &corev1.PodList{})},
		{"runtime classes can be listed", list(client.node, "runtimeclasses", fields.Everything(), &nodev1.RuntimeClassList{})},
		{"CSI drivers can be listed", list(client.storage, "csidrivers", fields.Everything(), &storagev1.CSIDriverList{})},
		{fmt.Sprintf("the CSINode of node %s can be read", node), func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, getTime)
			defer cancel()
			_, err := client.csiNode(ctx, node)
			if apierrors.IsNotFound(err) {
				return nil // whether there is such a node is tried next
			}
			return err
		}},
		{fmt.Sprintf("there is a node %s", node), func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, getTime)
			defer cancel()
			err := ask(client.core).Resource("nodes").Name(node).Do(ctx).Into(&corev1.Node{})
			if apierrors.IsForbidden(err) {
				return nil // a service account need not have that right: it is not told
			}
			return err
		}},
	}
}
