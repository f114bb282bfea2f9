/* A page that was opened as a file may start no worker: the search's script runs in a hidden frame there instead. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.close()
      inside.postMessage = data => {
        const message = new MessageEvent("message", { data: structuredClone(data) })
        setTimeout(() => this.dispatchEvent(message))
      }
      const script = inside.document.createElement("script")
      this.ready = new Promise(resolve => { script.onload = resolve })
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `${url} cannot be read` }))
      script.src = url
      inside.document.head.append(script)
    }

    postMessage(data) {
      const copy = structuredClone(data)
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: copy })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
