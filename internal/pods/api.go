package pods

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// How long the API server may take to answer.
const (
	getTime  = 5 * time.Second
	listTime = 30 * time.Second
)

// api asks the API server. It knows the kinds that we need and no others, which
// keeps a typed client for all of Kubernetes out of the daemon's memory.
type api struct {
	client              *http.Client
	host                string
	core, node, storage *rest.RESTClient
	params              runtime.ParameterCodec
}

func newAPI(config *rest.Config) (*api, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, nodev1.AddToScheme, storagev1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	a := &api{client: client, host: config.Host, params: runtime.NewParameterCodec(scheme)}
	for _, group := range []struct {
		client  **rest.RESTClient
		version schema.GroupVersion
		path    string
	}{
		{&a.core, corev1.SchemeGroupVersion, "/api"},
		{&a.node, nodev1.SchemeGroupVersion, "/apis"},
		{&a.storage, storagev1.SchemeGroupVersion, "/apis"},
	} {
		own := rest.CopyConfig(config)
		own.GroupVersion, own.APIPath = &group.version, group.path
		if *group.client, err = rest.RESTClientForConfigAndClient(own, client); err != nil {
			return nil, fmt.Errorf("a client for %s cannot be made: %w", group.version, err)
		}
	}
	return a, nil
}

// ask begins a request. It is made once: client-go would go on for ten seconds where
// a server ends connections, and who asks us would not learn that it is away.
func ask(from *rest.RESTClient) *rest.Request { return from.Get().MaxRetries(0) }

// claim gets a claim. A node identity may not watch those of its pods.
func (a *api) claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	out := &corev1.PersistentVolumeClaim{}
	err := ask(a.core).Namespace(namespace).Resource("persistentvolumeclaims").Name(name).Do(ctx).Into(out)
	return out, err
}

// volume gets a persistent volume.
func (a *api) volume(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	out := &corev1.PersistentVolume{}
	err := ask(a.core).Resource("persistentvolumes").Name(name).Do(ctx).Into(out)
	return out, err
}

// csiNode gets a node's CSINode.
func (a *api) csiNode(ctx context.Context, node string) (*storagev1.CSINode, error) {
	out := &storagev1.CSINode{}
	err := ask(a.storage).Resource("csinodes").Name(node).Do(ctx).Into(out)
	return out, err
}

// list gets objects of one kind, those of this node where a selector says so.
func (a *api) list(ctx context.Context, from *rest.RESTClient, resource string, selector fields.Selector,
	options metav1.ListOptions, into runtime.Object,
) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	options.FieldSelector = selector.String()
	err := ask(from).Resource(resource).VersionedParams(&options, a.params).Do(ctx).Into(into)
	return into, err
}

// watch follows them. The API server ends each watch after some minutes, and
// client-go's pings find out where it is gone without a word.
func (a *api) watch(ctx context.Context, from *rest.RESTClient, resource string, selector fields.Selector,
	options metav1.ListOptions,
) (watch.Interface, error) {
	options.Watch, options.FieldSelector = true, selector.String()
	found, err := ask(from).Resource(resource).VersionedParams(&options, a.params).Watch(ctx)
	if err == nil && reflect.TypeOf(found) == reflect.TypeOf(watch.NewEmptyWatch()) {
		// Where the connection ends instead of an answer, client-go makes up a watch
		// that is over.
		return nil, errNoAnswer
	}
	return found, err
}

var errNoAnswer = errors.New("the connection ended without an answer")
