package pods

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// How long the API server may take to answer.
const (
	getTime  = 5 * time.Second
	listTime = 30 * time.Second
)

// requestsAtOnce is how many requests of a client may wait for the beginning of their answer.
const requestsAtOnce = 2 * getsAtOnce

// The API groups that are asked for, by their paths.
const (
	coreGroup    = "/api/v1"
	nodeGroup    = "/apis/node.k8s.io/v1"
	storageGroup = "/apis/storage.k8s.io/v1"
)

type kind struct {
	what            string // its name in errors
	group, resource string
	selector        string
	example, list   runtime.Object
}

var (
	classKind = kind{
		what: allClasses, group: nodeGroup, resource: "runtimeclasses", example: &nodev1.RuntimeClass{}, list: &nodev1.RuntimeClassList{},
	}
	driverKind = kind{
		what: allDrivers, group: storageGroup, resource: "csidrivers", example: &storagev1.CSIDriver{}, list: &storagev1.CSIDriverList{},
	}
)

// api is a client of the API server. It knows only the kinds that we need: a typed client
// for all of Kubernetes would cost the daemon much memory.
type api struct {
	client *rest.RESTClient
	host   string
	params runtime.ParameterCodec
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	return scheme, errors.Join(corev1.AddToScheme(scheme), nodev1.AddToScheme(scheme), storagev1.AddToScheme(scheme))
}

func newAPI(config *rest.Config) (*api, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.GroupVersion = &corev1.SchemeGroupVersion // parameters of requests are the same in all groups
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	transport = &bounded{transport, make(chan struct{}, requestsAtOnce)}
	client, err := rest.UnversionedRESTClientForConfigAndClient(config, &http.Client{Transport: transport})
	if err != nil {
		return nil, err
	}
	return &api{client: client, host: config.Host, params: runtime.NewParameterCodec(scheme)}, nil
}

func (a *api) close() { a.client.Client.CloseIdleConnections() }

// bounded ends each request with its context, also while the kubeconfig's credential program hangs, which
// nothing cancels. So many goroutines of this client wait for it.
type bounded struct {
	next  http.RoundTripper
	slots chan struct{}
}

func (b *bounded) RoundTrip(request *http.Request) (response *http.Response, err error) {
	ended := request.Context().Done()
	select {
	case b.slots <- struct{}{}:
	case <-ended:
		return nil, request.Context().Err()
	}
	done := make(chan func())
	go func() {
		defer func() { <-b.slots }()
		late, failed := b.next.RoundTrip(request) //nolint:bodyclose // by the caller, if it is still there
		select {
		case done <- func() { response, err = late, failed }:
		case <-ended:
			if failed == nil {
				_ = late.Body.Close()
			}
		}
	}()
	select {
	case take := <-done:
		take()
		return response, err
	case <-ended:
		return nil, request.Context().Err()
	}
}

func (b *bounded) CloseIdleConnections() { net.CloseIdleConnectionsFor(b.next) }

// ask begins a request that is not retried. client-go would retry for ten seconds while a
// server closes connections, and our caller would not learn that the server is away.
func (a *api) ask(group, resource string) *rest.Request {
	return a.client.Get().MaxRetries(0).AbsPath(group).Resource(resource)
}

func (a *api) list(ctx context.Context, of kind, options metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	options.FieldSelector = of.selector
	into := of.list.DeepCopyObject()
	return into, a.ask(of.group, of.resource).VersionedParams(&options, a.params).Do(ctx).Into(into)
}

// watch watches the objects of a kind. The API server ends each watch after some minutes,
// and client-go's pings detect a server that vanished without closing the connection.
func (a *api) watch(ctx context.Context, of kind, options metav1.ListOptions) (watch.Interface, error) {
	options.Watch, options.FieldSelector = true, of.selector
	found, err := a.ask(of.group, of.resource).VersionedParams(&options, a.params).Watch(ctx)
	if err == nil && reflect.TypeOf(found) == reflect.TypeOf(watch.NewEmptyWatch()) {
		// If the connection ends before the answer, client-go returns a watch without events.
		return nil, errNoAnswer
	}
	return found, err
}

var errNoAnswer = errors.New("the connection ended without an answer")

// server is the current API server. It explains its errors.
type server struct {
	node   string // this node's name
	client atomic.Pointer[api]
}

// explain turns an error of the API server, or of the connection to it, into a sentence.
func (s *server) explain(err error) error { return apiserver.Explain(err, s.host(), s.node) }

func (s *server) host() string {
	if client := s.client.Load(); client != nil {
		return client.host
	}
	return "of the kubeconfig"
}

// get gets one object. Errors name it what. The namespace is "" for kinds without one. Claims are not
// watched, because a node's identity may only get those of its pods.
func (s *server) get(ctx context.Context, what, group, resource, namespace, name string, into runtime.Object) error {
	client := s.client.Load()
	if client == nil {
		return volume.Errorf(volume.Timeout, "%s is not known: no API server was asked yet", what)
	}
	if err := client.ask(group, resource).NamespaceIfScoped(namespace, namespace != "").Name(name).Do(ctx).Into(into); err != nil {
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
