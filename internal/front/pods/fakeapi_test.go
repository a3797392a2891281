package pods

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// fakeAPI is an API server of a few kinds: get, list, watch and the streamed list,
// in JSON. It does what the test tells it.
type fakeAPI struct {
	t      *testing.T
	server *httptest.Server

	mu       sync.Mutex
	version  int
	objects  map[string]map[string]runtime.Object // by resource, then namespace/name
	events   []event
	news     chan struct{}
	cut      chan struct{} // closed to end all watches
	away     bool
	streams  bool                // whether lists are streamed
	refuse   map[string]int      // status codes by "verb resource"
	hold     map[string]chan any // gets of a resource wait until it is closed
	asked    map[string]int      // requests by "verb resource/name"
	selector map[string]string   // of the last list or watch of a resource
}

type event struct {
	version  int
	resource string
	kind     string
	object   runtime.Object
}

// newFakeAPI makes an API server that has these claims, each bound.
func newFakeAPI(t *testing.T, claims ...string) *fakeAPI {
	t.Helper()
	f := &fakeAPI{
		t: t, objects: make(map[string]map[string]runtime.Object), news: make(chan struct{}), cut: make(chan struct{}), version: 10,
		refuse: make(map[string]int), hold: make(map[string]chan any), asked: make(map[string]int), selector: make(map[string]string),
	}
	f.server = httptest.NewServer(f)
	t.Cleanup(func() { f.cutWatches(); f.server.Close() })
	f.putBound(claims...)
	return f
}

// kubeconfig writes one that leads to the fake.
func (f *fakeAPI) kubeconfig() string {
	path := filepath.Join(f.t.TempDir(), "kubeconfig")
	f.writeKubeconfig(path)
	return path
}

func (f *fakeAPI) writeKubeconfig(path string) {
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: %q}}]\n"+
		"contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: t}}]\n", f.server.URL)
	check.Must(f.t, os.WriteFile(path, []byte(text), 0o600))
}

func (f *fakeAPI) put(objects ...runtime.Object) {
	f.t.Helper()
	for _, object := range objects {
		f.change("", object)
	}
}

func (f *fakeAPI) remove(object runtime.Object) { f.change("DELETED", object) }

func (f *fakeAPI) change(kind string, object runtime.Object) {
	object = object.DeepCopyObject()
	head := object.(metav1.Object) //nolint:errcheck,forcetypeassert // all our kinds are
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	head.SetResourceVersion(strconv.Itoa(f.version))
	resource, key := resourceOf(f.t, object), head.GetNamespace()+"/"+head.GetName()
	if f.objects[resource] == nil {
		f.objects[resource] = make(map[string]runtime.Object)
	}
	if kind == "DELETED" {
		delete(f.objects[resource], key)
	} else {
		kind = "ADDED"
		if f.objects[resource][key] != nil {
			kind = "MODIFIED"
		}
		f.objects[resource][key] = object
	}
	f.events = append(f.events, event{f.version, resource, kind, object})
	close(f.news)
	f.news = make(chan struct{})
}

// resourceOf names the resource of an object, and enters its kind.
func resourceOf(t *testing.T, object runtime.Object) string {
	kinds, _, err := scheme.Scheme.ObjectKinds(object)
	check.Must(t, err)
	object.GetObjectKind().SetGroupVersionKind(kinds[0])
	resource, _ := meta.UnsafeGuessKindToResource(kinds[0])
	return resource.Resource
}

// setAway makes the server break off whatever it is asked, and all watches.
func (f *fakeAPI) setAway(away bool) {
	f.mu.Lock()
	f.away = away
	f.mu.Unlock()
	if away {
		f.cutWatches()
	}
}

func (f *fakeAPI) cutWatches() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.cut)
	f.cut = make(chan struct{})
}

// forget ends all watches and drops the history: a watch from before is answered with "gone".
func (f *fakeAPI) forget() {
	f.cutWatches()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version += 100
	f.events = nil
}

func (f *fakeAPI) setRefused(what string, code int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse[what] = code
}

// holdGets makes gets of a resource wait until the returned func is called.
func (f *fakeAPI) holdGets(resource string) (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	held := make(chan any)
	f.hold[resource] = held
	return func() {
		f.mu.Lock()
		delete(f.hold, resource)
		f.mu.Unlock()
		close(held)
	}
}

func (f *fakeAPI) count(what string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[what]
}

func (f *fakeAPI) selectorOf(resource string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.selector[resource]
}

// ServeHTTP answers.
func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, key, verb := parse(r)
	f.mu.Lock()
	f.asked[verb+" "+resource+key]++
	if verb != "get" {
		f.selector[resource] = r.URL.Query().Get("fieldSelector")
	}
	code, away, held, cut := f.refuse[verb+" "+resource], f.away, f.hold[resource], f.cut
	f.mu.Unlock()
	switch {
	case away:
		panic(http.ErrAbortHandler) // the connection ends without a word
	case code != 0:
		failWith(w, code, resource)
	case verb == "get":
		if held != nil {
			select {
			case <-held:
			case <-r.Context().Done():
				return
			}
		}
		f.get(w, resource, key)
	case verb == "list":
		f.list(w, resource)
	default:
		f.watch(w, r, resource, cut)
	}
}

func parse(r *http.Request) (resource, key, verb string) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	parts = parts[2:] // api/v1
	if strings.HasPrefix(r.URL.Path, "/apis/") {
		parts = parts[1:]
	}
	namespace := ""
	if parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	switch {
	case len(parts) == 2:
		return parts[0], namespace + "/" + parts[1], "get"
	case r.URL.Query().Get("watch") != "":
		return parts[0], "", "watch"
	default:
		return parts[0], "", "list"
	}
}

func failWith(w http.ResponseWriter, code int, what string) {
	reason := map[int]metav1.StatusReason{
		403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound, 401: metav1.StatusReasonUnauthorized,
		409: metav1.StatusReasonAlreadyExists, 410: metav1.StatusReasonExpired, 422: metav1.StatusReasonInvalid, 500: metav1.StatusReasonInternalError,
		503: metav1.StatusReasonServiceUnavailable,
	}[code]
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
		Code: int32(code), Reason: reason, Message: what + ": " + string(reason), //nolint:gosec // a status code
	})
}

func (f *fakeAPI) get(w http.ResponseWriter, resource, key string) {
	f.mu.Lock()
	object := f.objects[resource][key]
	f.mu.Unlock()
	if object == nil {
		failWith(w, 404, resource)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object)
}

func (f *fakeAPI) all(resource string) []runtime.Object {
	return slices.AppendSeq([]runtime.Object{}, maps.Values(f.objects[resource]))
}

// kindOf has the version and kind of what is listed.
var kindOf = map[string][2]string{
	"pods": {"v1", "Pod"}, "runtimeclasses": {"node.k8s.io/v1", "RuntimeClass"}, "csidrivers": {"storage.k8s.io/v1", "CSIDriver"},
}

func (f *fakeAPI) list(w http.ResponseWriter, resource string) {
	f.mu.Lock()
	items, version := f.all(resource), f.version
	f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": kindOf[resource][0], "kind": kindOf[resource][1] + "List", "metadata": metav1.ListMeta{ResourceVersion: strconv.Itoa(version)}, "items": items,
	})
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, resource string, cut chan struct{}) {
	streamed := r.URL.Query().Get("sendInitialEvents") == "true"
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	f.mu.Lock()
	first, version := f.all(resource), f.version
	streams := f.streams
	oldest := version + 1
	if len(f.events) > 0 {
		oldest = f.events[0].version
	}
	f.mu.Unlock()
	switch {
	case streamed && !streams:
		failWith(w, 422, resource)
		return
	case !streamed && since < oldest-1:
		failWith(w, 410, resource)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	send := func(kind string, object any) {
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": object})
		_ = http.NewResponseController(w).Flush()
	}
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	if streamed {
		for _, object := range first {
			send("ADDED", object)
		}
		send("BOOKMARK", bookmark(resource, version))
		since = version
	}
	f.stream(r, resource, since, cut, send)
}

func (f *fakeAPI) stream(r *http.Request, resource string, since int, cut chan struct{}, send func(string, any)) {
	for {
		f.mu.Lock()
		if f.cut != cut {
			f.mu.Unlock()
			return
		}
		fresh := slices.DeleteFunc(slices.Clone(f.events), func(e event) bool { return e.version <= since || e.resource != resource })
		news := f.news
		f.mu.Unlock()
		for _, e := range fresh {
			send(e.kind, e.object)
			since = e.version
		}
		select {
		case <-news:
		case <-cut:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func bookmark(resource string, version int) any {
	return map[string]any{"apiVersion": kindOf[resource][0], "kind": kindOf[resource][1], "metadata": metav1.ObjectMeta{
		ResourceVersion: strconv.Itoa(version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
	}}
}
