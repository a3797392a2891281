// Package cluster shows and checks the nodes of a cluster that have crust-proxy: crustctl nodes and
// volumes, and kubectl crust. It asks the daemons at the port of their metrics, through the API server's
// proxy and with the caller's own rights, or directly.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

const (
	// mostAnswer bounds an answer: the metrics of a large node, a page of volumes, and all pages of a node together.
	mostAnswer  = 32 << 20
	askedAtOnce = 16
)

// access is how the cluster is reached, and which of its daemons are asked.
type access struct {
	kubeconfig, context, system, selector, nodeSelector string
	nodes                                               []string
	port                                                int
	patience                                            time.Duration
}

func (a *access) flags(set *pflag.FlagSet) {
	set.StringVar(&a.kubeconfig, "kubeconfig", "", "the kubeconfig; else KUBECONFIG, else ~/.kube/config")
	set.StringVar(&a.context, "context", "", "the kubeconfig's context")
	set.StringVar(&a.system, "system-namespace", "", "where the pods of crust-proxy are; empty is all namespaces")
	set.StringVar(&a.selector, "selector", "app.kubernetes.io/name=crust-proxy", "the label of these pods")
	set.StringVar(&a.nodeSelector, "node-selector", "", "ask nodes with this label, that have the package, at their own address")
	set.StringSliceVar(&a.nodes, "node", nil, "only these nodes")
	set.IntVar(&a.port, "port", 9814, "the port of the metrics, where no pod names it")
	set.DurationVar(&a.patience, "request-timeout", 15*time.Second, "how long one node, or the API server, may take")
}

type api struct {
	client   *rest.RESTClient
	host     string
	patience time.Duration
}

func (a *access) connect() (*api, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = a.kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.context}).ClientConfig()
	if err != nil {
		return nil, command.Explain(fmt.Errorf("the kubeconfig cannot be used: %w", err),
			"Name one by --kubeconfig or KUBECONFIG, or ask without an API server: crustctl nodes SERVICE:PORT")
	}
	config.UserAgent, config.QPS = "crustctl", -1
	client, err := apiserver.Plain(config)
	return &api{client, config.Host, a.patience}, err
}

func (k *api) get(ctx context.Context, uri string, into any) error {
	raw, err := k.raw(ctx, uri)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, into)
}

// raw reads an answer of bounded size, within the time that one may take.
func (k *api) raw(ctx context.Context, uri string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, k.patience)
	defer cancel()
	body, err := k.client.Get().MaxRetries(0).RequestURI(uri).Stream(ctx)
	if err != nil {
		return nil, apiserver.Clipped(err)
	}
	defer func() { _ = body.Close() }()
	return bounded(body)
}

func bounded(body io.Reader) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(body, mostAnswer+1))
	if err == nil && len(raw) > mostAnswer {
		err = fmt.Errorf("the answer has more than %d bytes", mostAnswer)
	}
	return raw, err
}

func list[T any](ctx context.Context, k *api, path string, query url.Values) (all []T, err error) {
	query.Set("limit", "500")
	for {
		var page objects[T]
		if err := k.get(ctx, path+"?"+query.Encode(), &page); err != nil {
			return all, fmt.Errorf("%s cannot be listed: %w", path[strings.LastIndexByte(path, '/')+1:], err)
		}
		all = append(all, page.Items...)
		if page.Metadata.Continue == "" {
			return all, nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
}

// place is one daemon, or where one should be.
type place struct {
	node string
	pod  *pod   // nil where it is not known, or the daemon is no pod
	why  string // it cannot be asked; empty if it can
	get  func(ctx context.Context, path string) ([]byte, error)
}

// places finds the daemons: the addresses of a service, or with the API server pods, and where there are
// none the nodes themselves. Without a service, k is the API server.
func (a *access) places(ctx context.Context, service string) (all []place, k *api, err error) {
	if service != "" {
		all, err = a.addresses(ctx, service)
		return all, nil, err
	}
	if k, err = a.connect(); err != nil {
		return nil, nil, err
	}
	if a.nodeSelector == "" {
		all, err = a.pods(ctx, k)
	}
	if len(all) == 0 && err == nil {
		all, err = a.machines(ctx, k)
	}
	all = slices.DeleteFunc(all, func(p place) bool { return len(a.nodes) > 0 && !slices.Contains(a.nodes, p.node) })
	for _, name := range a.nodes {
		if err == nil && !slices.ContainsFunc(all, func(p place) bool { return p.node == name }) {
			all = append(all, place{node: name, why: "no crust-proxy is known there: there is no such node, or no pod on it"})
		}
	}
	switch {
	case apierrors.IsForbidden(err):
		err = command.Explain(err, "Name the namespace of crust-proxy's pods by --system-namespace, or ask without an API server: crustctl nodes SERVICE:PORT")
	case err == nil && len(all) == 0:
		err = errors.New("there is no node to be asked")
	}
	slices.SortStableFunc(all, func(x, y place) int { return strings.Compare(x.node, y.node) })
	return all, k, err
}

func (a *access) addresses(ctx context.Context, service string) ([]place, error) {
	host, port, err := net.SplitHostPort(service)
	if err != nil {
		return nil, fmt.Errorf("%q is not host:port: %w", service, err)
	}
	found, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return nil, err
	}
	slices.Sort(found)
	var all []place
	for _, address := range slices.Compact(found) {
		base := "http://" + net.JoinHostPort(address, port)
		all = append(all, place{node: address, get: func(ctx context.Context, path string) ([]byte, error) { return fetch(ctx, base+path) }})
	}
	return all, nil
}

// direct asks a daemon by its address: it uses no proxy, and does not follow a daemon to another server.
var direct = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

func fetch(ctx context.Context, address string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	reply, err := direct.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		return nil, errors.New("the answer is " + reply.Status)
	}
	return bounded(reply.Body)
}

// space is the part of a path that names the namespace of crust-proxy, if that is given.
func (a *access) space() string {
	return show.When(a.system != "", "/namespaces/"+url.PathEscape(a.system))
}

func (a *access) pods(ctx context.Context, k *api) ([]place, error) {
	found, err := list[pod](ctx, k, "/api/v1"+a.space()+"/pods", url.Values{"labelSelector": {a.selector}})
	var all []place
	for _, p := range found {
		if p.Metadata.DeletionTimestamp != nil || !p.ours() { // while a pod ends, another one may begin on its node
			continue
		}
		at := k.proxy("/api/v1/namespaces/" + url.PathEscape(p.Metadata.Namespace) + "/pods/" + proxied(p.Metadata.Name, p.port(a.port)))
		at.node, at.pod = p.Spec.NodeName, &p
		if why := strings.TrimSpace(p.waits()); why != "" {
			at.why = "pod " + p.Metadata.Name + " does not run: " + why
		}
		all = append(all, at)
	}
	return all, err
}

// machines are the nodes, asked at their own addresses. Which of them have the package is not known.
func (a *access) machines(ctx context.Context, k *api) ([]place, error) {
	found, err := list[node](ctx, k, "/api/v1/nodes", url.Values{"labelSelector": {a.nodeSelector}})
	var all []place
	for _, n := range found {
		at := k.proxy("/api/v1/nodes/" + proxied(n.Metadata.Name, a.port))
		at.node = n.Metadata.Name
		all = append(all, at)
	}
	return all, err
}

func proxied(name string, port int) string {
	return url.PathEscape(name) + ":" + strconv.Itoa(port) + "/proxy"
}

func (k *api) proxy(base string) place {
	return place{get: func(ctx context.Context, path string) ([]byte, error) { return k.raw(ctx, base+path) }}
}
