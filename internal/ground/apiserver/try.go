package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
)

// Trial is one thing that was tried, and its result.
type Trial struct {
	// What was tried, as a sentence.
	What string
	Err  error
}

// Try checks whether pods can be looked up with an identity: whether it can be read, whether the API server
// answers, and whether it grants the rights. It ends at the first failure that makes the others meaningless.
func Try(ctx context.Context, who Identity, node string) []Trial {
	config, err := who.Config()
	if err != nil {
		return []Trial{{"the identity can be read", err}}
	}
	client, err := Plain(config)
	if err != nil {
		return []Trial{{"the identity can be used", err}}
	}
	defer client.Client.CloseIdleConnections()
	var out []Trial
	for _, one := range trials(node) {
		err := get(ctx, client, one.uri, &metav1.TypeMeta{})
		if err != nil && one.fine != nil && one.fine(err) {
			err = nil
		}
		if err != nil {
			err = Explain(err, config.Host, node)
		}
		out = append(out, Trial{one.what, err})
		if err != nil && apierrors.ReasonForError(err) == metav1.StatusReasonUnknown {
			break // it cannot be reached
		}
	}
	return out
}

// Get reads one answer of the API server into the value, as JSON. node is this node's name.
func Get(ctx context.Context, who Identity, node, uri string, into any) error {
	config, err := who.Config()
	if err != nil {
		return err
	}
	client, err := Plain(config)
	if err != nil {
		return err
	}
	defer client.Client.CloseIdleConnections()
	if err := get(ctx, client, uri, into); err != nil {
		return Explain(err, config.Host, node)
	}
	return nil
}

func get(ctx context.Context, client *rest.RESTClient, uri string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, tryTime)
	defer cancel()
	body, err := client.Get().MaxRetries(0).RequestURI(uri).Stream(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	return json.NewDecoder(body).Decode(into) // of a watch, the first event
}

// tryTime is how long the API server may take to answer.
const tryTime = 5 * time.Second

type trial struct {
	what, uri string
	fine      func(error) bool // errors that mean nothing
}

// empty is an error that says nothing of a right: there is no such object or event, or, to a node, it is of none of its pods.
func empty(err error) bool {
	return errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsNotFound(err) || strings.Contains(err.Error(), "no relationship found")
}

func trials(node string) []trial {
	const storage = "/apis/storage.k8s.io/v1/"
	ofNode := url.QueryEscape(fields.OneTermEqualSelector("spec.nodeName", node).String())
	out := []trial{
		{fmt.Sprintf("the pods of node %s can be listed", node), "/api/v1/pods?limit=1&fieldSelector=" + ofNode, nil},
		{"runtime classes can be listed", "/apis/node.k8s.io/v1/runtimeclasses?limit=1", nil},
		{"CSI drivers can be listed", storage + "csidrivers?limit=1", nil},
	}
	for _, list := range out {
		out = append(out, trial{strings.Replace(list.what, "listed", "watched", 1), strings.Replace(list.uri, "limit=1", "watch=1&timeoutSeconds=1", 1), empty})
	}
	return append(out, []trial{
		{"claims can be read", "/api/v1/namespaces/default/persistentvolumeclaims/crust-proxy-trial", empty},
		{"persistent volumes can be read", "/api/v1/persistentvolumes/crust-proxy-trial", empty},
		// Whether there is such a node is tried next.
		{fmt.Sprintf("the CSINode of node %s can be read", node), storage + "csinodes/" + url.PathEscape(node), apierrors.IsNotFound},
		// A service account need not have that right.
		{fmt.Sprintf("there is a node %s", node), "/api/v1/nodes/" + url.PathEscape(node), apierrors.IsForbidden},
	}...)
}
