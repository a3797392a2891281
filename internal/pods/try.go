package pods

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Trial is one thing that was tried, and its result.
type Trial struct {
	// What was tried, as a sentence.
	What string
	Err  error
}

// Try checks whether pods can be looked up with an identity: whether it can be read, whether
// the API server answers, and whether it grants the rights. It ends at the first failure
// that makes the others meaningless.
func Try(ctx context.Context, who Identity, node string) []Trial {
	config, err := who.config()
	if err != nil {
		return []Trial{{"the identity can be read", err}}
	}
	client, err := newAPI(config)
	if err != nil {
		return []Trial{{"the identity can be used", err}}
	}
	defer client.close()
	asked := server{node: node}
	asked.client.Store(client)
	var out []Trial
	for _, one := range trials(client, node) {
		bounded, cancel := context.WithTimeout(ctx, getTime)
		err := one.try(bounded)
		cancel()
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
	list := func(of kind) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := client.list(ctx, of, metav1.ListOptions{Limit: 1})
			return err
		}
	}
	return []trial{
		{fmt.Sprintf("the pods of node %s can be listed", node), list(podKind(node))},
		{"runtime classes can be listed", list(classKind)},
		{"CSI drivers can be listed", list(driverKind)},
		{fmt.Sprintf("the CSINode of node %s can be read", node), func(ctx context.Context) error {
			err := client.get(ctx, storageGroup, "csinodes", "", node, &storagev1.CSINode{})
			if apierrors.IsNotFound(err) {
				return nil // whether there is such a node is checked next
			}
			return err
		}},
		{fmt.Sprintf("there is a node %s", node), func(ctx context.Context) error {
			err := client.get(ctx, coreGroup, "nodes", "", node, &corev1.Node{})
			if apierrors.IsForbidden(err) {
				return nil // a service account need not have that right
			}
			return err
		}},
	}
}
