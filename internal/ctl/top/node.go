package top

import (
	"maps"
	"slices"
	"time"

	"sigs.k8s.io/yaml"
)

// nodeInfo is what is known of the daemon and its parts; its texts are escaped.
type nodeInfo struct {
	name, version   string
	started         time.Time
	handlers, fine  int
	drivers, ready  int
	frontOn, health bool
	problems        []string
}

// learn takes what the daemon said of itself; what it did not say stays.
func (n *nodeInfo) learn(s *State, e Looked) {
	if e.Node != nil {
		n.version, n.started = s.clean(e.Node.GetVersion()), timeOf(e.Node.GetStartedAt())
		n.configured(s, e.Node.GetConfig())
	}
	if e.Handlers == nil && e.Drivers == nil {
		return
	}
	n.health = true
	n.problems = nil
	n.handlers, n.fine = len(e.Handlers), 0
	for _, h := range e.Handlers {
		if h.GetHealthy() {
			n.fine++
			continue
		}
		n.problems = append(n.problems, s.clean("handler "+h.GetName()+": "+h.GetProblem()))
	}
	all := e.Drivers.GetDrivers()
	n.frontOn, n.drivers, n.ready = e.Drivers.GetFrontEnabled(), len(all), 0
	for _, d := range all {
		if d.GetReady() {
			n.ready++
			continue
		}
		n.problems = append(n.problems, s.clean("driver "+d.GetName()+": "+d.GetProblem()))
	}
	for _, finding := range e.Node.GetFindings() {
		n.problems = append(n.problems, s.clean(finding))
	}
}

// configured takes the node's name, and how much the relay takes, from the
// daemon's configuration.
func (n *nodeInfo) configured(s *State, text string) {
	var config struct {
		Cluster struct {
			NodeName string `json:"nodeName"`
		} `json:"cluster"`
		Relay struct {
			Concurrency int `json:"concurrency"`
		} `json:"relay"`
	}
	if yaml.Unmarshal([]byte(text), &config) != nil {
		return // the daemon is of another version: what it does not tell is done without
	}
	if n.name = s.clean(config.Cluster.NodeName); n.name == "" {
		n.name = s.clean(s.settings.Host)
	}
	if config.Relay.Concurrency > 0 {
		// At most a half of what the relay takes: the rest is for kubelet.
		s.limit = max(1, min(atOnce, config.Relay.Concurrency/2))
	}
}

// byState counts the volumes of the picture, the most urgent states first.
func (s *State) byState() (names []string, counts map[string]int) {
	counts = make(map[string]int)
	urgent := make(map[string]int)
	for _, r := range s.picture() {
		counts[r.state]++
		urgent[r.state] = urgency(r)
	}
	names = slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return urgent[a] - urgent[b] })
	return names, counts
}

// sum is all of the list's bytes together, and of how many volumes they are known.
func (s *State) sum() (all measure, volumes int) {
	for _, r := range s.list.rows {
		if r.bytes.known {
			all.known = true
			all.used += r.bytes.used
			all.total += r.bytes.total
			volumes++
		}
	}
	return all, volumes
}
